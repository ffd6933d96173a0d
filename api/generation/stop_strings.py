"""Finding stop strings in a text that arrives in pieces, without ever letting out a part of one. Used by `choice.py`.

The match that ends first wins; of those that end together, the one that starts first. The text before it is the answer.
Each stop string runs its own Knuth-Morris-Pratt automaton (doi:10.1137/0206024): its state is the length of the longest
suffix of the text that is a prefix of the stop string, so the longest state is exactly what must be held back.
"""

import re
from collections.abc import Sequence


class _Automaton:
    """One stop string. The failure table grows only as far as the text has matched, however long the string is."""

    __slots__ = ("_failure", "pattern", "state")

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.state = 0
        self._failure = [0]

    def step(self, character: str) -> bool:
        """Take one character; returns whether the stop string ends with it. Not to be called after that."""
        pattern = self.pattern
        state = self.state
        while state and pattern[state] != character:
            state = self._failure[state - 1]
        if pattern[state] == character:
            state += 1
            self._extend(state)
        self.state = state
        return state == len(pattern)

    def _extend(self, length: int) -> None:
        """Make sure that the failure table covers the first `length` characters."""
        failure = self._failure
        while len(failure) < length:
            position = len(failure)
            border = failure[-1]
            while border and self.pattern[border] != self.pattern[position]:
                border = failure[border - 1]
            failure.append(border + (self.pattern[border] == self.pattern[position]))


class StopMatcher:
    """Holds back exactly the longest suffix of the text that is a proper prefix of some stop string."""

    __slots__ = ("_automata", "_first_characters", "_held")

    def __init__(self, stop_strings: Sequence[str]):
        """`stop_strings`: at least one, none empty."""
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stop_strings)]
        first = "".join(sorted({stop[0] for stop in stop_strings}))
        self._first_characters = re.compile(f"[{re.escape(first)}]")
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text. Returns what may be let out now, and the stop string that was found, if one was.

        After a match, what was let out so far is the whole answer; the matcher is not to be used again.
        """
        if not self._held and self._first_characters.search(text) is None:
            return text, None
        automata = self._automata
        known = len(self._held)
        self._held += text
        for position, character in enumerate(text, known + 1):
            found = [automaton.pattern for automaton in automata if automaton.step(character)]
            if found:
                stop = max(found, key=len)
                return self._held[: position - len(stop)], stop
        keep = max([automaton.state for automaton in automata])
        split = len(self._held) - keep
        released, self._held = self._held[:split], self._held[split:]
        return released, None

    def finish(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held
