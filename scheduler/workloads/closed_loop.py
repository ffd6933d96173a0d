"""A closed loop: so many clients, each of which sends its next request when its last one has ended."""

from collections.abc import Iterator
from random import Random

from scheduler.policies.options import non_negative, whole
from scheduler.simulation.records import Arrival
from scheduler.workloads.requests import RequestShape, RequestSource


class ClosedLoop:
    """`num_requests` in all. Clients begin within the first `stagger_secs` and think for `think_secs` on average."""

    def __init__(
        self,
        shape: RequestShape,
        num_requests: int,
        seed: int,
        num_clients: int = 32,
        think_secs: float = 0.0,
        stagger_secs: float = 0.0,
    ):
        self._source = RequestSource(shape, seed)
        self._left = whole("num_requests", num_requests)
        self._num_clients = whole("num_clients", num_clients)
        self._think_secs = non_negative("think_secs", think_secs)
        self._stagger_secs = non_negative("stagger_secs", stagger_secs)
        self._pauses = Random(f"{seed}/pauses")

    def arrivals(self) -> Iterator[Arrival]:
        """Each client's first request."""
        for time in sorted(self._pauses.random() * self._stagger_secs for _ in range(self._num_clients)):
            yield from self._next(time)

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        """The same client's next request."""
        pause = self._pauses.expovariate(1.0 / self._think_secs) if self._think_secs else 0.0
        return self._next(now + pause)

    def _next(self, time: float) -> tuple[Arrival, ...]:
        if not self._left:
            return ()
        self._left -= 1
        return (self._source.next(time),)
