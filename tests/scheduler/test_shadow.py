"""A second policy on live arrivals: its own order, its own first tokens, and nothing left behind."""

import pytest

from scheduler import ConfigError, Request, SchedulerConfig
from scheduler.shadow import LearntCost, Shadow
from scheduler.simulation.records import StepShape

DECODE = StepShape(1, 1, 0, 10, 10)


def live(name: str, now: float, priority: float = 0.5, max_new_tokens: int = 100) -> Request:
    return Request(name, tuple(range(8)), max_new_tokens, arrival_time=now, priority=priority)


def test_it_follows_its_own_policy():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, waiting_queue_policy="priority", preempt_running=False))
    for name, priority in (("first", 0.5), ("low", 0.0), ("high", 1.0)):
        assert shadow.arrive(live(name, 0.0, priority), 0.0)
    for step in range(1, 60):
        shadow.observe_step(DECODE, 0.05, step * 0.05)
        for name in ("first", "low", "high"):
            if step == 5:
                shadow.end(name, 4, step * 0.05)
    order = [event.request_id for event in shadow.take_events()]
    assert order == ["first", "high", "low"]
    assert shadow.num_waiting == 0


def test_it_learns_step_times_and_predicts_with_them():
    cost = LearntCost()
    assert cost.step_seconds(DECODE) == 0.05
    for _ in range(200):
        cost.observe(DECODE, 0.2)
    assert cost.step_seconds(DECODE) == pytest.approx(0.2)
    assert cost.step_seconds(StepShape(30, 500, 480, 900, 9000)) == pytest.approx(0.2), "the nearest it knows"


def test_a_request_that_ended_without_a_token_is_forgotten():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1))
    shadow.arrive(live("a", 0.0), 0.0)
    shadow.arrive(live("b", 0.0), 0.0)
    shadow.end("b", 0, 0.01)
    shadow.end("a", 2, 0.02)
    shadow.observe_step(DECODE, 0.05, 10.0)
    assert [event.request_id for event in shadow.take_events()] == ["a"]
    assert shadow._replica.num_live == 0


def test_a_full_shadow_queue_is_no_error():
    shadow = Shadow(SchedulerConfig(max_num_seqs=1, max_queue_size=0))
    assert shadow.arrive(live("a", 0.0), 0.0)
    assert not shadow.arrive(live("b", 0.0), 0.0)
    shadow.end("b", 5, 1.0)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="lottery"):
        Shadow(SchedulerConfig(waiting_queue_policy="lottery"))
