"""The order of the waiting: `fcfs` and `priority`, and the queue that keeps it. Used by `Scheduler` and its parts.

The rule of `priority`:

- effective priority = given priority + aging_per_second · seconds waited. Time spent running does not count; time
  waited before a preemption does. Highest goes first, equal ones by arrival (order of being added).
- Requests of one given priority never overtake each other: they go by arrival. A preempted request arrived before those
  that never started, and so goes before them. Whoever stands in front of a request that has aged more is served as if
  it had aged as much.
- A higher newcomer wins over a preempted request, unless that has aged past it.
- Eviction compares given priorities: strictly lower only. A request that started because it had aged to the newcomer's
  given priority is spared, else it would be put back for ever.

All the waiting age at one rate, so the order of two of them is fixed: effective(t) = priority + aging ·
(t − queued_at), of which priority − aging · queued_at alone tells requests apart. Keys are static and heaps serve.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError, InvariantError
from scheduler.request import Request


class QueuePolicy(Protocol):
    """What a policy decides. Pure: nothing here mutates, blocks or raises."""

    def group(self, request: Request) -> float:
        """Requests of one group are served strictly by arrival. Fixed for life."""

    def waiting_key(self, request: Request) -> float:
        """Urgency, the least first; fixed while the request waits. Also orders the running for the token budget."""

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """Order among the running when pages are short: the greatest is put back first."""

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Whether `running` may be put back so that `newcomer` can start."""

    def is_spared(self, running: Request, other: Request) -> bool:
        """Whether `other`, though more important, may not take pages from `running`."""


class FcfsPolicy:
    """First come, first served; the given priority has no effect. A preempted request keeps its place in line."""

    def group(self, request: Request) -> float:
        """All in one line."""
        return 0.0

    def waiting_key(self, request: Request) -> float:
        """All alike: arrival decides."""
        return 0.0

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """The latest is put back first."""
        return (0.0, request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Never."""
        return False

    def is_spared(self, running: Request, other: Request) -> bool:
        """Never: nobody ages."""
        return False


class PriorityPolicy:
    """Highest effective priority first; the module's docstring has the whole rule."""

    def __init__(self, aging_per_second: float, preempt_running: bool):
        self._aging = aging_per_second
        self._preempt_running = preempt_running

    def group(self, request: Request) -> float:
        """One line per given priority."""
        return request.priority

    def waiting_key(self, request: Request) -> float:
        """Greatest effective priority first."""
        return self._aging * request.queued_at - request.priority

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """Lowest given priority first, then the latest."""
        return (-request.priority, request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Strictly lower given priority, and not started on account of age."""
        return (
            self._preempt_running
            and running.priority < newcomer.priority
            and self._effective_at_start(running) < newcomer.priority
        )

    def is_spared(self, running: Request, other: Request) -> bool:
        """Started because it had aged to the other's given priority."""
        return running.priority < other.priority <= self._effective_at_start(running)

    def _effective_at_start(self, running: Request) -> float:
        return self._aging * running.admitted_at - running.admitted_key


def make_policy(config: SchedulerConfig) -> QueuePolicy:
    """The policy that the configuration names. Raises ConfigError for an unknown name."""
    if config.waiting_queue_policy == "fcfs":
        return FcfsPolicy()
    if config.waiting_queue_policy == "priority":
        return PriorityPolicy(config.aging_per_second, config.preempt_running)
    raise ConfigError(f"unknown waiting_queue_policy {config.waiting_queue_policy!r}; known: fcfs, priority")


# (key of the group's most urgent member, sequence of its first member, group)
_Front = tuple[float, int, float]


@dataclass(slots=True, eq=False)
class _Line:
    """One group: its members by arrival, and the same by key. Both heaps may hold members that have left."""

    by_arrival: list[tuple[int, int, Request]] = field(default_factory=list)
    by_key: list[tuple[float, int, str]] = field(default_factory=list)
    size: int = 0
    front: _Front | None = None


class WaitingQueue:
    """Heaps with lazy deletion: push, pop and remove are O(log n) amortised, peek O(1).

    A group is served by arrival, and as urgently as its most urgent member: whoever stands before it inherits its key.
    """

    def __init__(self, policy: QueuePolicy):
        self._policy = policy
        self._lines: dict[float, _Line] = {}
        self._fronts: list[_Front] = []
        self._live: dict[str, tuple[int, Request]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """The waiting in the order in which they would go. O(n log n): for tests and reports."""
        return iter([request for _, request in self._in_order()])

    def push(self, request: Request) -> None:
        """Add a request; its key must not change while it waits."""
        self._pushes += 1
        self._live[request.request_id] = (self._pushes, request)
        group = self._policy.group(request)
        line = self._lines.setdefault(group, _Line())
        heapq.heappush(line.by_arrival, (request.sequence, self._pushes, request))
        heapq.heappush(line.by_key, (self._policy.waiting_key(request), self._pushes, request.request_id))
        line.size += 1
        self._refresh(group, line)

    def peek(self) -> Request | None:
        """The request that goes next, or None."""
        front = self._front()
        return None if front is None else self._lines[front[2]].by_arrival[0][2]

    def key(self) -> float:
        """The key, its own or inherited, of the request that goes next; the queue must not be empty."""
        front = self._front()
        if front is None:
            raise IndexError("the waiting queue is empty")
        return front[0]

    def pop(self) -> Request:
        """Take the request that goes next; the queue must not be empty."""
        request = self.peek()
        if request is None:
            raise IndexError("the waiting queue is empty")
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> bool:
        """Drop a request wherever it stands; False if it does not wait."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            return False
        group = self._policy.group(entry[1])
        line = self._lines[group]
        line.size -= 1
        self._refresh(group, line)
        return True

    def check(self) -> None:
        """Raise InvariantError unless the lines hold exactly the waiting and the front is where the order begins."""
        order = self._in_order()
        if len(order) != len(self._live) or sum(line.size for line in self._lines.values()) != len(self._live):
            raise InvariantError("a waiting request is lost, or queued twice")
        if self.peek() is not (order[0][1] if order else None) or (order and self.key() != order[0][0]):
            raise InvariantError("the front of the waiting queue is not its first")
        if any(line.size < 1 for line in self._lines.values()):
            raise InvariantError("an empty line of waiting requests is kept")

    def _in_order(self) -> list[tuple[float, Request]]:
        order = []
        for line in self._lines.values():
            key = float("inf")
            for _, push, request in sorted(line.by_arrival, key=lambda entry: entry[:2], reverse=True):
                if self._is_live(request.request_id, push):
                    key = min(key, self._policy.waiting_key(request))
                    order.append((key, request))
        return sorted(order, key=lambda entry: (entry[0], entry[1].sequence))

    def _is_live(self, request_id: str, push: int) -> bool:
        entry = self._live.get(request_id)
        return entry is not None and entry[0] == push

    def _front(self) -> _Front | None:
        while self._fronts:
            front = self._fronts[0]
            line = self._lines.get(front[2])
            if line is not None and line.front == front:
                return front
            heapq.heappop(self._fronts)
        return None

    def _refresh(self, group: float, line: _Line) -> None:
        """A line has changed: find its front again and forget most of those that have left."""
        if len(self._fronts) > 64 + 2 * len(self._lines):
            self._fronts = [known.front for known in self._lines.values() if known.front is not None]
            heapq.heapify(self._fronts)
        if not line.size:
            del self._lines[group]
            return
        if len(line.by_arrival) > 64 + 2 * line.size:
            line.by_arrival = [entry for entry in line.by_arrival if self._is_live(entry[2].request_id, entry[1])]
            heapq.heapify(line.by_arrival)
        if len(line.by_key) > 64 + 2 * line.size:
            line.by_key = [entry for entry in line.by_key if self._is_live(entry[2], entry[1])]
            heapq.heapify(line.by_key)
        while not self._is_live(line.by_arrival[0][2].request_id, line.by_arrival[0][1]):
            heapq.heappop(line.by_arrival)
        while not self._is_live(line.by_key[0][2], line.by_key[0][1]):
            heapq.heappop(line.by_key)
        front = (line.by_key[0][0], line.by_arrival[0][0], group)
        if front != line.front:
            line.front = front
            heapq.heappush(self._fronts, front)
