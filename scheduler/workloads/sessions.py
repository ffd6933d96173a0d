"""Conversations: each turn's prompt is everything said before, and something new; so most of it may be cached."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from scheduler.errors import ConfigError
from scheduler.policies.options import non_negative, positive, whole
from scheduler.simulation.records import Arrival
from scheduler.workloads.requests import BLOCK_SIZE, PREFIX_IDS_END, RequestShape, RequestSource

# Ids of a session's blocks lie apart from those of shared prefixes and of other sessions.
_SESSION_SPAN = 1 << 24


@dataclass(slots=True)
class _Session:
    """One conversation. `last`: its turn before, if there was one.

    It has a source of its own, so that what is said does not depend on how fast others are answered.
    """

    number: int
    turns_left: int
    source: RequestSource
    last: Arrival | None = None
    num_turns: int = 0


class Sessions:
    """Sessions begin as a Poisson process of `rate` / `turns` a second, so that `rate` counts requests.

    A session has a geometric number of turns with mean `turns`. The next turn comes an exponential time, `think_secs`
    on average, after the last answer. The shape's input lengths are those of what is new in a turn. Priority, tenant
    and shared prefix are a session's own.
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
        self._shape = shape
        self._rate = positive("rate", rate) / positive("turns", turns)
        if turns < 1:
            raise ConfigError(f"turns must be at least 1, not {turns}")
        self._turns = turns
        self._think_secs = non_negative("think_secs", think_secs)
        self._left = whole("num_requests", num_requests)
        self._starts = Random(f"{seed}/starts")
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
            source = RequestSource(self._shape, f"{self._seed}/session/{number}")
            yield self._turn(_Session(number, self._draw_turns(number), source), time)

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        """The session's next turn, if there is one."""
        session = self._open.pop(arrival.request_id)
        if session.turns_left < 1 or not self._left:
            return ()
        pauses = Random(f"{self._seed}/pause/{session.number}/{session.turns_left}")
        pause = pauses.expovariate(1.0 / self._think_secs) if self._think_secs else 0.0
        return (self._turn(session, now + pause),)

    def _draw_turns(self, number: int) -> int:
        rng = Random(f"{self._seed}/turns/{number}")
        turns = 1
        while rng.random() >= 1.0 / self._turns:
            turns += 1
        return turns

    def _turn(self, session: _Session, time: float) -> Arrival:
        self._left -= 1
        session.turns_left -= 1
        fresh = session.source.next(time, f"s{session.number}")
        arrival = replace(fresh, request_id=f"s{session.number}-{session.num_turns}")
        shared = fresh.hash_ids
        if (last := session.last) is not None:
            # The shared prefix comes once, at the start, and is in the history already.
            prefix_length = self._shape.prefix_length if self._shape.num_prefixes else 0
            said = last.input_length + last.output_length + fresh.input_length - prefix_length
            shared = last.hash_ids[: len(shared)]
            arrival = replace(arrival, input_length=said, priority=last.priority, tenant=last.tenant)
        first = PREFIX_IDS_END + session.number * _SESSION_SPAN
        own = range(first, first + arrival.input_length // BLOCK_SIZE - len(shared))
        session.last = arrival = replace(arrival, hash_ids=(*shared, *own))
        session.num_turns += 1
        self._open[arrival.request_id] = session
        return arrival
