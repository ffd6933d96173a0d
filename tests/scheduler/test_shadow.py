"""A second policy on live arrivals: its own order, its own first tokens, and nothing left behind."""

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import ConfigError, Request, SchedulerConfig
from scheduler.shadow import LearntCost, Shadow
from scheduler.simulation.records import StepShape
from scheduler.simulation.replica import Replica

DECODE = StepShape(1, 1, 0, 10, 10)


def run(shadow: Shadow, until: float) -> None:
    while shadow.advance(until):
        shadow.check()
    shadow.check()


def live(name: str, now: float, priority: float = 0.5, max_new_tokens: int = 100) -> Request:
    return Request(name, tuple(range(8)), max_new_tokens, arrival_time=now, priority=priority)


def test_it_follows_its_own_policy():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, waiting_queue_policy="priority", preempt_running=False))
    for name, priority in (("first", 0.5), ("low", 0.0), ("high", 1.0)):
        shadow.arrive(live(name, 0.0, priority), 0.0)
    for name in ("first", "low", "high"):
        shadow.end(name, 4, 0.25)
    run(shadow, 1.0)
    assert shadow.take_events() == [
        ("first", pytest.approx(0.05)),
        ("high", pytest.approx(0.30)),
        ("low", pytest.approx(0.55)),
    ]
    assert shadow.num_waiting == 0


def test_requests_have_their_real_length_whatever_the_order():
    """One slot: live fcfs serves `low` for 10 steps before `high`; in the shadow `high` keeps the slot for 2 only.

    A step is planned before the one under way has shown that a request ends, so each end wastes one.
    """
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, waiting_queue_policy="priority", preempt_running=False))
    for name, priority in (("first", 0.5), ("low", 0.0), ("high", 1.0)):
        shadow.arrive(live(name, 0.0, priority), 0.0)
    lengths = {"first": 3, "low": 10, "high": 2}
    order = [name for name, length in lengths.items() for _ in range(length)]
    drawn = dict.fromkeys(lengths, 0)
    for step, name in enumerate(order, 1):
        shadow.observe_step(DECODE, 0.05)
        drawn[name] += 1
        if drawn[name] == lengths[name]:
            shadow.end(name, drawn[name], step * 0.05)
        else:
            shadow.progress(name, drawn[name])
        run(shadow, step * 0.05)
    run(shadow, 9.0)
    assert shadow.take_events() == [
        ("first", pytest.approx(0.05)),
        ("high", pytest.approx(0.25)),
        ("low", pytest.approx(0.40)),
    ]
    assert shadow._twins == {}


def test_it_waits_for_what_only_the_live_engine_can_know():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1))
    shadow.arrive(live("a", 0.0), 0.0)
    run(shadow, 60.0)
    assert shadow.undecided() == ["a"]
    assert shadow.take_events() == []
    shadow.progress("a", 3)
    run(shadow, 60.0)
    assert shadow.undecided() == ["a"]
    assert shadow.take_events() == [("a", pytest.approx(0.05))]
    shadow.arrive(live("b", 60.0), 60.0)
    shadow.end("a", 3, 60.0)
    shadow.end("b", 1, 61.0)
    run(shadow, 62.0)
    assert shadow.take_events() == [("b", pytest.approx(60.05))]
    assert shadow._replica.num_live == shadow.num_inputs == 0


def test_a_request_that_ended_before_its_twin_began_is_predicted_all_the_same():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, waiting_queue_policy="priority", preempt_running=False))
    shadow.arrive(live("first", 0.0), 0.0)
    shadow.arrive(live("low", 0.1, priority=0.0), 0.1)
    shadow.end("low", 1, 0.2)
    for name in ("high", "higher"):
        shadow.arrive(live(name, 0.3, priority=1.0), 0.3)
    for name in ("first", "high", "higher"):
        shadow.end(name, 10, 2.0)
    run(shadow, 3.0)
    assert [event.request_id for event in shadow.take_events()] == ["first", "high", "higher", "low"]


def test_preemptions_are_counted():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, waiting_queue_policy="priority"))
    shadow.arrive(live("low", 0.0, priority=0.0), 0.0)
    shadow.arrive(live("high", 0.12, priority=1.0), 0.12)
    shadow.end("low", 20, 1.0)
    shadow.end("high", 20, 2.0)
    run(shadow, 3.0)
    assert shadow.num_preemptions == 1
    assert [event.request_id for event in shadow.take_events()] == ["low", "high"]


@given(st.integers(0, 2**32), st.sampled_from(["fcfs", "priority", "fair", "sjf", "mlfq", "prefix"]))
@settings(max_examples=40, deadline=None)
def test_nothing_is_left_behind(seed: int, policy: str):
    """Whatever order the live engine serves in: every twin ends, and each request has one event."""
    rng = random.Random(seed)
    config = SchedulerConfig(max_num_seqs=3, num_pages=12, page_size=4, max_queue_size=20, waiting_queue_policy=policy)
    shadow = Shadow(config)
    drawn: dict[str, int] = {}
    arrived, events, now = 0, [], 0.0
    for _ in range(400):
        now += rng.random() * 0.1
        shadow.observe_step(DECODE, rng.random() * 0.05)
        if rng.random() < 0.3 and arrived < 60:
            arrived += 1
            drawn[str(arrived)] = 0
            shadow.arrive(live(str(arrived), now, rng.random(), rng.choice([0, 1, 20])), now)
        for name in rng.sample(sorted(drawn), min(3, len(drawn))):
            drawn[name] += rng.random() < 0.8
            if rng.random() < 0.2:
                shadow.end(name, drawn.pop(name), now)
        for name in shadow.undecided():
            shadow.progress(name, drawn[name])
        run(shadow, now)
        events += shadow.take_events()
    for name in sorted(drawn):
        shadow.end(name, drawn[name], now)
    run(shadow, now + 1000)
    events += shadow.take_events()
    assert sorted(int(event.request_id) for event in events) == list(range(1, arrived + 1))
    assert shadow._twins == {}
    assert shadow._replica.num_live == shadow.num_inputs == shadow.num_waiting == 0
    assert shadow._replica.scheduler.stats().pages_in_use == 0


def first_tokens(config: SchedulerConfig, lengths: list[int], shadow: Shadow | None = None) -> dict[str, float]:
    """Run an engine on one request each 30 ms, the n-th of `lengths[n]` tokens; `shadow` hears what a server tells."""
    cost = LearntCost()
    cost.observe(DECODE, 0.05)
    engine = Replica("live", config, cost)
    firsts: dict[str, float] = {}
    drawn = [0] * len(lengths)
    coming = deque((0.0301 * n, str(n)) for n in range(len(lengths)))
    ends_at = None
    while coming or ends_at is not None:
        if coming and (ends_at is None or coming[0][0] < ends_at):
            now, name = coming.popleft()
            engine.add(live(name, now, (int(name) % 3) / 2), lengths[int(name)], now)
            if shadow is not None:
                shadow.arrive(live(name, now, (int(name) % 3) / 2), now)
            ends_at = engine.wake(now) or ends_at
            continue
        now = ends_at
        events, ends_at = engine.end_step(now)
        for event in events:
            firsts.setdefault(event.request_id, now)
            drawn[int(event.request_id)] += 1
            if shadow is not None and event.finish_reason is not None:
                shadow.end(event.request_id, drawn[int(event.request_id)], now)
        if shadow is not None:
            for name in shadow.undecided():
                shadow.progress(name, drawn[int(name)])
            run(shadow, now)
    return firsts


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "mlfq"])
@pytest.mark.parametrize("live_policy", ["fcfs", "priority"])
def test_it_predicts_what_an_engine_with_its_policy_does(policy: str, live_policy: str):
    rng = random.Random(7)
    lengths = [rng.randrange(1, 12) for _ in range(60)]
    config = SchedulerConfig(max_num_seqs=3, waiting_queue_policy=live_policy)
    shadowed = replace(config, waiting_queue_policy=policy)
    cost = LearntCost()
    cost.observe(DECODE, 0.05)
    shadow = Shadow(shadowed, cost)
    came = first_tokens(config, lengths, shadow)
    run(shadow, 1000.0)
    predicted = dict(shadow.take_events())
    assert predicted == pytest.approx(first_tokens(shadowed, lengths), abs=1e-6)
    if {policy, live_policy} == {"fcfs", "priority"}:
        assert predicted != pytest.approx(came, abs=1e-2), "the policies differ on this workload"


def test_it_learns_step_times_and_predicts_with_them():
    cost = LearntCost()
    assert cost.step_seconds(DECODE) == 0.05
    for _ in range(200):
        cost.observe(DECODE, 0.2)
    cost.observe(DECODE, 0.0)
    assert cost.step_seconds(DECODE) == pytest.approx(0.19)
    cost = LearntCost()
    for seconds in (9.2, *[0.2] * 8):
        cost.observe(DECODE, seconds)
    assert cost.step_seconds(DECODE) == pytest.approx(1.2), "one slow start is one of nine"
    cost = LearntCost()
    cost.observe(DECODE, 0.2)
    assert cost.step_seconds(DECODE) == pytest.approx(0.2)
    assert cost.step_seconds(StepShape(30, 500, 480, 900, 9000)) == pytest.approx(0.2), "the nearest it knows"


def test_a_request_that_ended_without_a_token_is_forgotten():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1))
    shadow.arrive(live("a", 0.0), 0.0)
    shadow.arrive(live("b", 0.0), 0.0)
    shadow.end("b", 0, 0.01)
    shadow.end("a", 2, 0.02)
    run(shadow, 10.0)
    assert shadow.take_events() == [("b", None), ("a", pytest.approx(0.05))]
    assert shadow._replica.num_live == 0


def test_a_full_shadow_queue_is_no_error():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, max_queue_size=0))
    shadow.arrive(live("a", 0.0), 0.0)
    shadow.arrive(live("b", 0.0), 0.0)
    run(shadow, 1.0)
    shadow.end("b", 5, 1.0)
    assert shadow.take_events() == [("b", None)]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="lottery"):
        Shadow(SchedulerConfig(waiting_queue_policy="lottery"))
