"""Conversations: each turn's prompt is everything said before, and something new; so most of it may be cached."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.policies.options import non_negative, positive, whole
from scheduler.simulation.records import Arrival
from scheduler.workloads.requests import BLOCK_SIZE, RequestShape, RequestSource

# Ids of a session's blocks lie apart from those of shared prefixes and of other sessions.
_SESSION_SPAN = 1 << 24


@dataclass(slots=True)
class _Session:
    """One conversation. `length`: tokens said so far, answers included."""

    number: int
    turns_left: int
    length: int = 0


class Sessions:
    """Sessions begin as a Poisson process of `rate` / `turns` a second, so that `rate` counts requests.

    A session has a geometric number of turns with mean `turns`. The next turn comes an exponential time, `think_secs`
    on average, after the last answer. The shape's input lengths are those of what is new in a turn.
    """

    def __init__(
        self,
        shape: RequestShape,
        rate: float,
        num_requests: int,
        seed: int,
        turns: float = 4.0,
        think_secs: float = 10.0,
    ):
        self._source = RequestSource(shape, seed)
        self._rate = positive("rate", rate) / positive("turns", turns)
        self._turns = max(turns, 1.0)
        self._think_secs = non_negative("think_secs", think_secs)
        self._left = whole("num_requests", num_requests)
        self._starts = random.Random(f"{seed}/starts")
        self._seed = seed
        self._open: dict[str, _Session] = {}
        self._num_sessions = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Each session's first turn."""
        time = 0.0
        while self._left:
            time += self._starts.expovariate(self._rate)
            number = self._num_sessions
            self._num_sessions += 1
            yield self._turn(_Session(number, self._draw_turns(number)), time)

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        """The session's next turn, if there is one."""
        session = self._open.pop(arrival.request_id)
        session.length = arrival.input_length + arrival.output_length
        if session.turns_left < 1 or not self._left:
            return ()
        pauses = random.Random(f"{self._seed}/pause/{session.number}/{session.turns_left}")
        pause = pauses.expovariate(1.0 / self._think_secs) if self._think_secs else 0.0
        return (self._turn(session, now + pause),)

    def _draw_turns(self, number: int) -> int:
        rng = random.Random(f"{self._seed}/turns/{number}")
        turns = 1
        while rng.random() >= 1.0 / self._turns:
            turns += 1
        return turns

    def _turn(self, session: _Session, time: float) -> Arrival:
        self._left -= 1
        session.turns_left -= 1
        fresh = self._source.next(time, f"s{session.number}")
        input_length = session.length + fresh.input_length
        first = (session.number + 1) * _SESSION_SPAN
        own = range(first, first + input_length // BLOCK_SIZE - len(fresh.hash_ids))
        arrival = replace(fresh, input_length=input_length, hash_ids=(*fresh.hash_ids, *own))
        self._open[arrival.request_id] = session
        return arrival
