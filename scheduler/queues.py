"""The order of the waiting: `fcfs` and `priority`. Used by `Scheduler` alone.

Effective priority rises with age, at the same rate for everybody, so the order of two waiting requests never changes and
a heap with fixed keys serves: effective(t) = priority + aging · (t − arrival), of which only priority − aging · arrival
tells requests apart. A preempted request keeps its arrival, and so goes before newcomers of its priority.
"""

import heapq
from collections.abc import Iterator
from typing import Protocol

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError
from scheduler.request import Request

SortKey = tuple[float, int]


class QueuePolicy(Protocol):
    """What a policy decides. Pure: nothing here mutates, blocks or raises."""

    def waiting_key(self, request: Request) -> SortKey:
        """Fixed while the request waits; the least goes first."""

    def running_key(self, request: Request) -> SortKey:
        """Order among the running: the least is served first, the greatest is put back first."""

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Whether `running` may be put back so that `newcomer` can start."""


class FcfsPolicy:
    """First come, first served; the given priority has no effect. A preempted request keeps its place in line."""

    def waiting_key(self, request: Request) -> SortKey:
        """By arrival."""
        return (0.0, request.sequence)

    def running_key(self, request: Request) -> SortKey:
        """By arrival."""
        return (0.0, request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Never."""
        return False


class PriorityPolicy:
    """Highest effective priority first; at equal given priority by arrival, which puts preempted requests first.

    A waiting request may evict running ones of strictly lower given priority. A running request that started because it
    had aged to the newcomer's given priority is spared: otherwise it would be put back for ever, and starve.
    """

    def __init__(self, aging_per_second: float, preempt_running: bool):
        self._aging = aging_per_second
        self._preempt_running = preempt_running

    def waiting_key(self, request: Request) -> SortKey:
        """Greatest effective priority first."""
        return (self._aging * request.arrival_time - request.priority, request.sequence)

    def running_key(self, request: Request) -> SortKey:
        """Greatest given priority first, then by arrival."""
        return (-request.priority, request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Strictly lower given priority, and not aged past the newcomer when it started."""
        return (
            self._preempt_running
            and running.priority < newcomer.priority
            and running.priority + self._aging * (running.admitted_at - running.arrival_time) < newcomer.priority
        )


def make_policy(config: SchedulerConfig) -> QueuePolicy:
    """The policy that the configuration names. Raises ConfigError for an unknown name."""
    if config.waiting_queue_policy == "fcfs":
        return FcfsPolicy()
    if config.waiting_queue_policy == "priority":
        return PriorityPolicy(config.aging_per_second, config.preempt_running)
    raise ConfigError(f"unknown waiting_queue_policy {config.waiting_queue_policy!r}; known: fcfs, priority")


class WaitingQueue:
    """A heap of waiting requests with lazy deletion: push, pop and remove are O(log n), peek O(1) amortised."""

    def __init__(self, policy: QueuePolicy):
        self._policy = policy
        self._heap: list[tuple[SortKey, int, Request]] = []
        self._live: dict[str, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """The waiting in order. O(n log n): for tests and reports."""
        return (entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]) if self._is_live(entry))

    def push(self, request: Request) -> None:
        """Add a request; its key must not change while it waits."""
        self._pushes += 1
        self._live[request.request_id] = self._pushes
        heapq.heappush(self._heap, (self._policy.waiting_key(request), self._pushes, request))

    def peek(self) -> Request | None:
        """The request that goes next, or None."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Take the request that goes next; the queue must not be empty."""
        request = self.peek()
        if request is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def remove(self, request_id: str) -> bool:
        """Drop a request wherever it stands; False if it does not wait."""
        if self._live.pop(request_id, None) is None:
            return False
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def _is_live(self, entry: tuple[SortKey, int, Request]) -> bool:
        return self._live.get(entry[2].request_id) == entry[1]
