"""Queues of the waiting, for policies to choose from: by a fixed key, by turns of groups, by a score of the oldest few.

`scheduler/line_queue.py` has a fourth, in which requests of one group never overtake each other. A policy makes its
queue (`Order.make_queue`), `Scheduler` and its parts use it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from scheduler.errors import InvariantError
from scheduler.request import Request


class WaitingQueue(Protocol):
    """The waiting. `push` and `remove` mutate, `peek` may reorganise; nothing blocks."""

    def __len__(self) -> int:
        """How many wait."""

    def __contains__(self, request_id: str) -> bool:
        """Whether a request waits."""

    def __iter__(self) -> Iterator[Request]:
        """The waiting in the order in which they would go now, as far as that is known. For tests and reports."""

    def push(self, request: Request) -> None:
        """Add a request, new or put back."""

    def peek(self, now: float) -> Request | None:
        """The request that goes next, or None. At one `now` the same until something is pushed, removed or charged."""

    def key(self) -> float:
        """The key under which the request that `peek` named last goes; kept as its `admitted_key`."""

    def remove(self, request_id: str) -> bool:
        """Drop a request wherever it stands; False if it does not wait."""

    def check(self) -> None:
        """Raise InvariantError if the bookkeeping is off."""


class HeapQueue:
    """The least key first, equal ones by arrival. Keys stand still while a request waits. O(log n) amortised."""

    def __init__(self, key: Callable[[Request], float]):
        self._key = key
        self._heap: list[tuple[float, int, int, Request]] = []
        self._live: dict[str, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(filter(self._is_live, self._heap)))

    def push(self, request: Request) -> None:
        """Add a request under its key."""
        self._pushes += 1
        self._live[request.request_id] = self._pushes
        heapq.heappush(self._heap, (self._key(request), request.sequence, self._pushes, request))

    def peek(self, now: float) -> Request | None:
        """The least; the order does not depend on `now`."""
        heap = self._heap
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def key(self) -> float:
        """The least key."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            raise IndexError("the waiting queue is empty")
        return self._heap[0][0]

    def remove(self, request_id: str) -> bool:
        """Forget a request; its entry goes when it comes up, or when most entries are dead."""
        if self._live.pop(request_id, None) is None:
            return False
        if len(self._heap) > 64 + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def check(self) -> None:
        """Raise InvariantError unless every waiting request has one entry."""
        if sorted(entry[2] for entry in self._heap if self._is_live(entry)) != sorted(self._live.values()):
            raise InvariantError("a waiting request is lost, or queued twice")

    def _is_live(self, entry: tuple[float, int, int, Request]) -> bool:
        return self._live.get(entry[3].request_id) == entry[2]


class TurnQueue:
    """Groups take turns: the group of least urgency goes first, and within a group the least key, then arrival.

    `urgency(group, head, now)` is asked of every group at each `peek`, so it may change at any time, and groups should
    be few (tenants, levels).
    """

    def __init__(
        self,
        group: Callable[[Request], Hashable],
        urgency: Callable[[Hashable, Request, float], float],
        key: Callable[[Request], float] = lambda request: 0.0,
    ):
        self._group = group
        self._urgency = urgency
        self._key = key
        self._groups: dict[Hashable, HeapQueue] = {}
        self._group_of: dict[str, Hashable] = {}
        self._last_key = 0.0

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._group_of

    def __iter__(self) -> Iterator[Request]:
        """Group after group: who goes after the first depends on what the first will be charged."""
        ordered = sorted(self._groups, key=lambda group: self._rank(group, 0.0)[:2])
        return (request for group in ordered for request in self._groups[group])

    def push(self, request: Request) -> None:
        """Add a request to its group; the group that it has now is the one it waits in."""
        group = self._group(request)
        self._group_of[request.request_id] = group
        if group not in self._groups:
            self._groups[group] = HeapQueue(self._key)
        self._groups[group].push(request)

    def peek(self, now: float) -> Request | None:
        """The first of the group whose turn it is; equal groups by the arrival of their heads."""
        if not self._groups:
            return None
        self._last_key, _, head = min((self._rank(group, now) for group in self._groups), key=lambda rank: rank[:2])
        return head

    def key(self) -> float:
        """The urgency of the group that `peek` chose."""
        return self._last_key

    def remove(self, request_id: str) -> bool:
        """Drop a request; a group without requests is forgotten."""
        group = self._group_of.pop(request_id, None)
        if group not in self._groups:
            return False
        removed = self._groups[group].remove(request_id)
        if not self._groups[group]:
            del self._groups[group]
        return removed

    def check(self) -> None:
        """Raise InvariantError unless the groups hold exactly the waiting, and none is empty."""
        for queue in self._groups.values():
            queue.check()
        if sum(map(len, self._groups.values())) != len(self._group_of) or not all(map(len, self._groups.values())):
            raise InvariantError("a waiting request is lost, or an empty group is kept")

    def _rank(self, group: Hashable, now: float) -> tuple[float, int, Request]:
        head = self._groups[group].peek(now)
        if head is None:
            raise InvariantError("an empty group is kept")
        return (self._urgency(group, head, now), head.sequence, head)


class WindowQueue:
    """Of the `window` oldest that of least score goes first, and the oldest after `max_wait_secs` whatever its score.

    Scores may change at any time (what the cache holds does), so they are asked for at each `peek`.
    """

    def __init__(self, score: Callable[[Request, float], float], window: int, max_wait_secs: float):
        self._score = score
        self._window = window
        self._max_wait_secs = max_wait_secs
        self._fresh = HeapQueue(lambda request: 0.0)
        self._oldest: OrderedDict[str, Request] = OrderedDict()
        self._last_key = 0.0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._oldest)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._oldest or request_id in self._fresh

    def __iter__(self) -> Iterator[Request]:
        yield from self._oldest.values()
        yield from self._fresh

    def push(self, request: Request) -> None:
        """Add a request; one put back is older than those that never ran and joins the window in its old place."""
        last = next(reversed(self._oldest.values()), None)
        if last is None or request.sequence > last.sequence:
            self._fresh.push(request)
            return
        members = sorted([*self._oldest.values(), request], key=lambda member: member.sequence)
        for surplus in members[self._window :]:
            self._fresh.push(surplus)
        self._oldest = OrderedDict((member.request_id, member) for member in members[: self._window])

    def peek(self, now: float) -> Request | None:
        """The least score in the window, equal ones by arrival; the oldest if it has waited too long."""
        while len(self._oldest) < self._window and (member := self._fresh.peek(now)) is not None:
            self._fresh.remove(member.request_id)
            self._oldest[member.request_id] = member
        if not self._oldest:
            return None
        oldest = next(iter(self._oldest.values()))
        if now - oldest.queued_at >= self._max_wait_secs:
            self._last_key = 0.0
            return oldest
        scored = [(self._score(member, now), member.sequence, member) for member in self._oldest.values()]
        self._last_key, _, chosen = min(scored, key=lambda entry: entry[:2])
        return chosen

    def key(self) -> float:
        """The score of the request that `peek` chose."""
        return self._last_key

    def remove(self, request_id: str) -> bool:
        """Drop a request from the window or from those behind it."""
        return self._oldest.pop(request_id, None) is not None or self._fresh.remove(request_id)

    def check(self) -> None:
        """Raise InvariantError unless the window holds the oldest, in order."""
        self._fresh.check()
        sequences = [member.sequence for member in self._oldest.values()]
        if sequences != sorted(sequences) or len(sequences) > self._window:
            raise InvariantError("the window of the oldest is out of order")
        behind = min((member.sequence for member in self._fresh), default=None)
        if sequences and behind is not None and behind < sequences[-1]:
            raise InvariantError("an older request waits behind the window")
