"""A waiting queue of lines: requests of one group are served strictly by arrival. The order of `priority`."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scheduler.errors import InvariantError
from scheduler.request import Request

# (key of the group's most urgent member, sequence of its first member, group)
_Front = tuple[float, int, float]


@dataclass(slots=True, eq=False)
class _Line:
    """One group: its members by arrival, and the same by key. Both heaps may hold members that have left."""

    by_arrival: list[tuple[int, int, Request]] = field(default_factory=list)
    by_key: list[tuple[float, int, str]] = field(default_factory=list)
    size: int = 0
    front: _Front | None = None


class LineQueue:
    """Heaps with lazy deletion: push, pop and remove are O(log n) amortised, peek O(1).

    A group is served by arrival, and as urgently as its most urgent member: whoever stands before it inherits its key.
    """

    def __init__(self, group: Callable[[Request], float], key: Callable[[Request], float]):
        self._group = group
        self._key = key
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
        group = self._group(request)
        line = self._lines.setdefault(group, _Line())
        heapq.heappush(line.by_arrival, (request.sequence, self._pushes, request))
        heapq.heappush(line.by_key, (self._key(request), self._pushes, request.request_id))
        line.size += 1
        self._refresh(group, line)

    def peek(self, now: float) -> Request | None:
        """The request that goes next, or None. The order does not depend on `now`."""
        front = self._front()
        return None if front is None else self._lines[front[2]].by_arrival[0][2]

    def key(self) -> float:
        """The key, its own or inherited, of the request that goes next; the queue must not be empty."""
        front = self._front()
        if front is None:
            raise IndexError("the waiting queue is empty")
        return front[0]

    def remove(self, request_id: str) -> bool:
        """Drop a request wherever it stands; False if it does not wait."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            return False
        group = self._group(entry[1])
        line = self._lines[group]
        line.size -= 1
        self._refresh(group, line)
        return True

    def check(self) -> None:
        """Raise InvariantError unless the lines hold exactly the waiting and the front is where the order begins."""
        order = self._in_order()
        if len(order) != len(self._live) or sum(line.size for line in self._lines.values()) != len(self._live):
            raise InvariantError("a waiting request is lost, or queued twice")
        if self.peek(0.0) is not (order[0][1] if order else None) or (order and self.key() != order[0][0]):
            raise InvariantError("the front of the waiting queue is not its first")
        if any(line.size < 1 for line in self._lines.values()):
            raise InvariantError("an empty line of waiting requests is kept")

    def _in_order(self) -> list[tuple[float, Request]]:
        order = []
        for line in self._lines.values():
            key = float("inf")
            for _, push, request in sorted(line.by_arrival, key=lambda entry: entry[:2], reverse=True):
                if self._is_live(request.request_id, push):
                    key = min(key, self._key(request))
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
