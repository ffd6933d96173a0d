"""The order of the waiting: arrival, priority, ageing, and those that were put back."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import ConfigError, Request, SchedulerConfig
from scheduler.policies import make_policy
from scheduler.policies.priority import PriorityOrder
from scheduler.queues import WaitingQueue


def make_queue(policy: str = "priority", aging: float = 0.01) -> WaitingQueue:
    return make_policy(SchedulerConfig(waiting_queue_policy=policy, aging_per_second=aging)).order.make_queue()


def pop(queue: WaitingQueue) -> Request:
    request = queue.peek(0.0)
    assert request is not None
    assert queue.remove(request.request_id)
    return request


def entry(sequence: int, priority: float = 0.5, queued_at: float = 0.0) -> Request:
    request = Request(f"r{sequence}", (1,), 1, priority=priority)
    request.sequence = sequence
    request.queued_at = queued_at
    return request


def drain(queue: WaitingQueue) -> list[int]:
    expected = [request.sequence for request in queue]
    order = []
    while queue:
        queue.check()
        order.append(pop(queue).sequence)
    assert order == expected
    return order


def test_fcfs_knows_arrival_only():
    queue = make_queue("fcfs")
    for sequence, priority in ((1, 0.0), (3, 1.0), (2, 0.5)):
        queue.push(entry(sequence, priority))
    assert drain(queue) == [1, 2, 3]


def test_higher_priority_first_and_ties_by_arrival():
    queue = make_queue()
    for sequence, priority in ((1, 0.0), (2, 0.5), (3, 1.0), (4, 0.5), (5, 1.0), (6, 0.0)):
        queue.push(entry(sequence, priority))
    assert drain(queue) == [3, 5, 2, 4, 1, 6]


def test_ageing_lifts_those_that_waited():
    queue = make_queue(aging=0.01)
    queue.push(entry(1, 0.0, queued_at=0.0))
    queue.push(entry(2, 1.0, queued_at=99.0))
    queue.push(entry(3, 1.0, queued_at=101.0))
    assert drain(queue) == [2, 1, 3]


def test_without_ageing_time_means_nothing():
    queue = make_queue(aging=0.0)
    queue.push(entry(1, 0.0, queued_at=0.0))
    queue.push(entry(2, 0.1, queued_at=1e9))
    assert drain(queue) == [2, 1]


def test_a_preempted_request_goes_before_equals_that_waited_longer():
    """It started at once and ran from 0 to 10; the equal one has waited since 1, and a higher one still wins."""
    queue = make_queue(aging=0.01)
    queue.push(entry(2, 0.5, queued_at=1.0))
    queue.push(entry(1, 0.5, queued_at=10.0))
    queue.push(entry(3, 0.6, queued_at=10.0))
    assert drain(queue) == [3, 1, 2]


def test_whoever_stands_before_an_aged_equal_inherits_its_urgency():
    queue = make_queue(aging=0.01)
    queue.push(entry(2, 0.5, queued_at=0.0))
    queue.push(entry(1, 0.5, queued_at=60.0))
    queue.push(entry(3, 1.0, queued_at=60.0))
    assert queue.key() == pytest.approx(-0.5)
    assert drain(queue) == [1, 2, 3]


def test_remove_and_push_again():
    queue = make_queue()
    first, second = entry(1), entry(2)
    queue.push(first)
    queue.push(second)
    assert queue.remove("r1")
    assert not queue.remove("r1")
    assert "r1" not in queue
    assert len(queue) == 1
    queue.push(first)
    queue.check()
    assert drain(queue) == [1, 2]
    assert queue.peek(0.0) is None
    with pytest.raises(IndexError):
        queue.key()


def test_unknown_policies_are_named():
    with pytest.raises(ConfigError, match="lifo"):
        make_policy(SchedulerConfig(waiting_queue_policy="lifo"))


def test_ten_thousand_waiting_cost_nothing_to_look_at():
    queue = make_queue()
    for sequence in range(10_000):
        queue.push(entry(sequence + 1, sequence / 10_000))
    started = time.perf_counter()
    for _ in range(1000):
        queue.peek(0.0)
    assert time.perf_counter() - started < 0.1
    for sequence in range(9_900):
        queue.remove(f"r{sequence + 1}")
    assert len(queue._fronts) < 1000, "those that left are forgotten"
    queue.check()


def test_a_long_life_leaves_no_litter():
    queue = make_queue()
    queue.push(entry(10**6, 0.5, queued_at=0.0))
    for sequence in range(1, 3000):
        queue.push(entry(sequence, 0.5, queued_at=float(sequence)))
        queue.push(entry(sequence + 10**7, sequence / 3000, queued_at=0.0))
        queue.remove(f"r{sequence}")
        queue.remove(f"r{sequence + 10**7}")
    assert len(queue._lines) == 1
    assert len(queue._fronts) + sum(len(line.by_key) + len(line.by_arrival) for line in queue._lines.values()) < 400
    queue.check()


steps = st.lists(
    st.tuples(st.sampled_from("ppppgrb"), st.sampled_from([0.0, 0.25, 0.5, 0.75]), st.integers(0, 50)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(script=steps, aging=st.sampled_from([0.0, 0.125, 0.5]), policy=st.sampled_from(["fcfs", "priority"]))
def test_against_the_rule_spelled_out(script, aging, policy):
    """The next is the first by arrival of the line that has the most urgent member."""
    queue = make_queue(policy, aging)
    rule = PriorityOrder(aging)
    waiting: list[Request] = []
    running: list[Request] = []

    def urgency(request: Request) -> tuple[float, int]:
        if policy == "fcfs":
            return (0.0, request.sequence)
        equals = [other for other in waiting if other.priority == request.priority]
        return (min(rule.waiting_key(o) for o in equals if o.sequence >= request.sequence), request.sequence)

    for now, (action, priority, number) in enumerate(script):
        if action == "p":
            request = entry(now + 1, priority, float(now))
            waiting.append(request)
            queue.push(request)
        elif action == "g" and waiting:
            request = min(waiting, key=urgency)
            assert pop(queue) is request
            waiting.remove(request)
            running.append(request)
        elif action == "r" and waiting:
            request = waiting.pop(number % len(waiting))
            assert queue.remove(request.request_id)
        elif action == "b" and running:
            request = running.pop(number % len(running))
            request.queued_at += number % 7
            waiting.append(request)
            queue.push(request)
        queue.check()
        assert list(queue) == sorted(waiting, key=urgency)
