"""HeapQueue, TurnQueue and WindowQueue against brute-force models: a list, sorted anew at every question.

`LineQueue` has its own in `test_queues.py`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import InvariantError, Request
from scheduler.queues import HeapQueue, TurnQueue, WaitingQueue, WindowQueue

# What to do, a key or group for a new request, and which request is meant.
scripts = st.lists(
    st.tuples(st.sampled_from("ppppprgbct"), st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=60
)


class Model:
    """Plays a script on a queue; a subclass says which request goes first, by looking at all."""

    def __init__(self) -> None:
        self.queue = self.make_queue()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.scores: dict[object, float] = {}
        self.now = 0.0

    def make_queue(self) -> WaitingQueue:
        raise NotImplementedError

    def first(self) -> tuple[float, Request]:
        """The key that the queue must name, and the request."""
        raise NotImplementedError

    def play(self, script: list[tuple[str, int, int]]) -> None:
        for index, (action, value, number) in enumerate(script):
            if action == "p":
                request = Request(f"r{index}", (1,), 1, priority=value)
                request.sequence = index + 1
                request.queued_at = self.now
                self.push(request)
            elif action == "r" and self.waiting:
                self.remove(self.waiting[number % len(self.waiting)])
            elif action == "g" and self.waiting:
                _, request = self.first()
                self.remove(request)
                self.running.append(request)
            elif action == "b" and self.running:
                request = self.running.pop(number % len(self.running))
                request.queued_at += number % 5
                self.push(request)
            elif action == "c":
                self.scores[value] = float(number % 4)
            elif action == "t":
                self.now += number / 10
            self.compare()

    def push(self, request: Request) -> None:
        self.waiting.append(request)
        self.queue.push(request)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        assert self.queue.remove(request.request_id)
        assert not self.queue.remove(request.request_id)
        assert request.request_id not in self.queue

    def compare(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)
        assert sorted(r.sequence for r in self.queue) == sorted(r.sequence for r in self.waiting)
        assert all(request.request_id in self.queue for request in self.waiting)
        head = self.queue.peek(self.now)
        if not self.waiting:
            assert head is None
            return
        key, request = self.first()
        assert head is request
        assert self.queue.key() == key
        self.queue.check()


class HeapModel(Model):
    def make_queue(self) -> WaitingQueue:
        return HeapQueue(lambda request: request.priority)

    def first(self) -> tuple[float, Request]:
        request = min(self.waiting, key=lambda request: (request.priority, request.sequence))
        return request.priority, request

    def compare(self) -> None:
        super().compare()
        assert list(self.queue) == sorted(self.waiting, key=lambda request: (request.priority, request.sequence))


class TurnModel(Model):
    """Groups by priority; their urgency changes while they wait, and with time."""

    def make_queue(self) -> WaitingQueue:
        return TurnQueue(lambda request: request.priority, self.urgency, lambda request: request.sequence % 3)

    def urgency(self, group: object, head: Request, now: float) -> float:
        return -1.0 if now - head.queued_at >= 6.0 else self.scores.get(group, 0.0)

    def first(self) -> tuple[float, Request]:
        heads = [
            min(
                (r for r in self.waiting if r.priority == group),
                key=lambda request: (request.sequence % 3, request.sequence),
            )
            for group in {request.priority for request in self.waiting}
        ]
        ranked = [(self.urgency(head.priority, head, self.now), head.sequence, head) for head in heads]
        key, _, head = min(ranked)
        return key, head


class WindowModel(Model):
    """Scores by priority; they change while requests wait. The window is of three."""

    def make_queue(self) -> WaitingQueue:
        return WindowQueue(lambda request, now: self.scores.get(request.priority, 0.0), window=3, max_wait_secs=6.0)

    def first(self) -> tuple[float, Request]:
        oldest = sorted(self.waiting, key=lambda request: request.sequence)[:3]
        if self.now - oldest[0].queued_at >= 6.0:
            return 0.0, oldest[0]
        ranked = [(self.scores.get(r.priority, 0.0), r.sequence, r) for r in oldest]
        key, _, request = min(ranked)
        return key, request


@settings(max_examples=150, deadline=None)
@given(script=scripts)
@pytest.mark.parametrize("model", [HeapModel, TurnModel, WindowModel])
def test_against_a_sorted_list(model, script):
    model().play(script)


@pytest.mark.parametrize("model", [HeapModel, TurnModel, WindowModel])
def test_an_empty_queue(model):
    queue = model().queue
    queue.check()
    assert (len(queue), list(queue), queue.peek(0.0), "r1" in queue) == (0, [], None, False)
    assert not queue.remove("r1")


def test_a_heap_that_is_empty_has_no_key():
    with pytest.raises(IndexError):
        HeapQueue(lambda request: 0.0).key()


def entry(sequence: int, priority: float = 0.5) -> Request:
    request = Request(f"r{sequence}", (1,), 1, priority=priority)
    request.sequence = sequence
    return request


def test_heaps_forget_those_that_left():
    queue = HeapQueue(lambda request: request.priority)
    queue.push(entry(1, 0.0))
    for sequence in range(2, 3000):
        queue.push(entry(sequence, 1.0))
        queue.remove(f"r{sequence}")
    assert len(queue._heap) < 100
    queue.check()


def test_groups_that_are_empty_are_forgotten():
    queue = TurnQueue(lambda request: request.priority, lambda group, head, now: 0.0)
    for sequence in range(1, 1000):
        queue.push(entry(sequence, float(sequence)))
        queue.remove(f"r{sequence}")
    assert queue._groups == {}
    queue.check()


@pytest.mark.parametrize("model", [HeapModel, TurnModel, WindowModel])
def test_check_finds_a_lost_request(model):
    queue = model().queue
    for sequence in range(1, 6):
        queue.push(entry(sequence))
    queue.peek(0.0)
    heaps = [queue] if isinstance(queue, HeapQueue) else [getattr(queue, "_fresh", None) or queue._groups[0.5]]
    heaps[0]._heap.pop()
    with pytest.raises(InvariantError):
        queue.check()
