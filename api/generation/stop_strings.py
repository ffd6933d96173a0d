"""Stop strings over a stream of text, at any alignment. Used by `api/generation/choice.py`.

Of several matches the one that ends first counts, then the one that starts first. Text that could still become a match
is held back, so that no part of a stop string is ever shown.
"""

from collections.abc import Sequence


class StopMatcher:
    """Text goes in, text that is safe to show comes out.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Take more text; return what may be shown. After a match, that is the text before it, and then nothing.

        Args:
            text: the next piece.
            armed: False for text that comes before `min_tokens` are out: it is shown, and no match begins in it.
        """
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        if not armed:
            return self.finish() + text
        buffer = self._held + text
        found = min(
            ((start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            _, start, self.matched = found
            self._held = ""
            return buffer[:start]
        keep = self._possible_start(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text held back: nothing more comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins some stop string."""
        for length in range(min(len(buffer), self._longest - 1), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
