"""Capacity policies: reserving to completion never preempts for want of pages, known tokens does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Scheduler, SchedulerConfig
from scheduler.policies import BUNDLED
from tests.scheduler.driver import Driver, make_request

growing = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 30), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 5)),
    min_size=2,
    max_size=12,
)


def crowd(requests: list, capacity: str, policy_name: str, depth: int, **fields: object) -> Driver:
    config = SchedulerConfig(
        **{  # type: ignore[arg-type]
            "waiting_queue_policy": policy_name,
            "capacity_policy": capacity,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "num_pages": 14,
            "page_size": 4,
            **fields,
        }
    )
    driver = Driver(Scheduler(config), depth)
    for index, (length, outputs, priority, steps) in enumerate(requests):
        driver.add(make_request(f"r{index}", length, outputs, priority=priority))
        for _ in range(steps):
            driver.step()
    driver.finish()
    driver.check_outputs()
    return driver


@settings(max_examples=60, deadline=None)
@given(
    requests=growing,
    policy_name=st.sampled_from(list(BUNDLED)),
    depth=st.sampled_from([0, 1]),
    reuse=st.booleans(),
    num_pages=st.sampled_from([13, 20]),
)
def test_reserving_to_completion_puts_nobody_back_for_want_of_pages(requests, policy_name, depth, reuse, num_pages):
    driver = crowd(
        requests,
        "reserve_to_completion",
        policy_name,
        depth,
        enable_prefix_reuse=reuse,
        num_pages=num_pages,
        preempt_running=False,
    )
    assert driver.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_known_tokens_puts_back_where_reserving_waits(depth):
    requests = [(4, 30, 0.5, 0)] * 6
    assert crowd(requests, "known_tokens", "fcfs", depth).scheduler.stats().num_preemptions > 0
    assert crowd(requests, "reserve_to_completion", "fcfs", depth).scheduler.stats().num_preemptions == 0


def test_reserving_to_completion_still_lets_the_more_important_evict():
    requests = [(4, 30, 0.0, 3), (4, 30, 1.0, 0)]
    fields = {"max_num_seqs": 1}
    driver = crowd(requests, "reserve_to_completion", "priority", 0, **fields)
    assert driver.requests["r0"].num_preemptions == 1
