"""Who starts, with how many tokens and which cached pages."""

import pytest

from scheduler import Request
from tests.scheduler.driver import Driver, make_request, make_scheduler


def lengths(plan) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}


def test_a_long_prompt_is_computed_in_chunks_and_samples_at_its_end_only():
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request("a", 20, 2))
    rows = [driver.step().rows[0] for _ in range(3)]
    assert [row.num_tokens for row in rows] == [8, 8, 4]
    assert [row.samples for row in rows] == [False, False, True]
    assert [row.starts for row in rows] == [True, False, False]
    assert [len(row.next_token_ids) for row in rows] == [8, 8, 3]


def test_decode_rows_come_first_and_prefill_takes_the_rest():
    driver = Driver(make_scheduler(max_num_batched_tokens=10))
    driver.add(make_request("a", 4, 20), make_request("b", 4, 20))
    driver.step()
    driver.add(make_request("c", 30, 4))
    plan = driver.step()
    assert [(row.request_id, row.num_tokens) for row in plan.rows] == [("a", 1), ("b", 1), ("c", 8)]


def test_running_prompts_are_served_before_new_ones_start():
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request("a", 20, 4), make_request("b", 8, 4))
    assert lengths(driver.step()) == {"a": 8}
    assert lengths(driver.step()) == {"a": 8}
    assert lengths(driver.step()) == {"a": 4, "b": 4}


def test_an_urgent_prompt_does_not_wait_behind_the_chunks_of_lower_ones():
    driver = Driver(make_scheduler(waiting_queue_policy="priority", max_num_batched_tokens=8))
    driver.add(make_request("low", 40, 4, priority=0.0))
    driver.step()
    driver.add(make_request("high", 12, 4, priority=1.0))
    assert lengths(driver.step()) == {"high": 8}
    assert lengths(driver.step()) == {"high": 4, "low": 1}
    assert lengths(driver.step()) == {"high": 1, "low": 7}
    driver.finish()
    driver.check_outputs()


def prompts_beside_a_decode(policy: str, *priorities: float) -> dict[str, int]:
    """The step in which prompts of 40 tokens meet one request that decodes."""
    driver = Driver(make_scheduler(waiting_queue_policy=policy, max_num_batched_tokens=100))
    driver.add(make_request("decodes", 4, 20, priority=1.0))
    driver.step()
    driver.add(*(make_request(f"r{index}", 40, 4, priority=value) for index, value in enumerate(priorities)))
    planned = lengths(driver.step())
    driver.finish()
    driver.check_outputs()
    return planned


def test_prompts_of_less_urgent_requests_lengthen_a_step_with_an_urgent_one_by_a_quarter():
    assert prompts_beside_a_decode("priority", 0.0, 1.0, 0.0) == {"decodes": 1, "r1": 40, "r0": 10}


def test_prompts_that_are_equally_urgent_share_the_whole_step():
    assert prompts_beside_a_decode("priority", 0.5, 0.5, 0.5) == {"decodes": 1, "r0": 40, "r1": 40, "r2": 19}
    assert prompts_beside_a_decode("fcfs", 0.0, 1.0, 0.0) == {"decodes": 1, "r0": 40, "r1": 40, "r2": 19}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_budget_smaller_than_the_slots_starves_nobody(depth):
    driver = Driver(make_scheduler(max_num_seqs=8, max_num_batched_tokens=3), depth)
    driver.add(*(make_request(f"r{index}", 4, 30) for index in range(8)))
    for _ in range(40):
        plan = driver.step()
        assert len(driver.running) <= 3
        assert plan.num_tokens <= 3
    driver.finish()
    driver.check_outputs()


def test_a_tight_budget_does_not_keep_an_urgent_request_out():
    driver = Driver(make_scheduler(waiting_queue_policy="priority", max_num_seqs=8, max_num_batched_tokens=2))
    driver.add(*(make_request(f"low{index}", 4, 40, priority=0.0) for index in range(3)))
    for _ in range(8):
        driver.step()
    driver.add(make_request("high", 4, 2, priority=1.0))
    for _ in range(6):
        driver.step()
    assert driver.finished["high"].finish_reason == "length"


def test_the_head_is_never_skipped_for_a_smaller_one():
    driver = Driver(make_scheduler(num_pages=10))
    driver.add(make_request("a", 16, 8))
    driver.step()
    driver.add(make_request("big", 28, 4), make_request("small", 2, 2))
    driver.step()
    assert driver.running == ["a"]
    driver.finish()
    driver.check_outputs()


def test_two_prompts_that_fill_the_pool_exactly_run_together():
    driver = Driver(make_scheduler(num_pages=8))
    driver.add(make_request("a", 15, 2), make_request("b", 15, 2))
    assert lengths(driver.step()) == {"a": 15, "b": 15}
    driver.finish()
    assert driver.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shares", [(0.7, 0.7), (0.4, 0.4, 0.4, 0.4), (0.9, 0.1, 0.9, 0.1)])
def test_half_admitted_prompts_do_not_block_each_other(shares, depth):
    driver = Driver(make_scheduler(num_pages=20, max_num_batched_tokens=7), depth)
    for index, share in enumerate(shares):
        driver.add(make_request(f"r{index}", int(80 * share) - 4, 4))
    driver.finish(limit=200)
    driver.check_outputs()
    assert all(len(plan.preempted) <= 1 for plan in driver.plans)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pool_smaller_than_one_context_is_legal(depth):
    scheduler = make_scheduler(num_pages=3, max_model_len=256)
    assert scheduler.max_new_tokens_for(5) == 8
    driver = Driver(scheduler, depth)
    driver.add(make_request("a", 5, 8), make_request("b", 12, 1), make_request("c", 1, 12))
    driver.finish()
    driver.check_outputs()


def test_a_shared_prefix_is_computed_once():
    driver = Driver(make_scheduler())
    prompt = tuple(range(100, 121))
    driver.add(Request("a", prompt, 2))
    driver.finish()
    driver.add(Request("b", (*prompt[:18], 7, 8), 2))
    plan = driver.step()
    assert (plan.rows[0].token_start, plan.rows[0].num_tokens) == (16, 4)
    driver.finish()
    assert driver.finished["a"].num_cached_tokens == 0
    assert driver.finished["b"].num_cached_tokens == 16
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (41, 16)


def test_at_least_one_token_is_left_to_compute():
    driver = Driver(make_scheduler())
    prompt = tuple(range(100, 116))
    driver.add(Request("a", prompt, 1))
    driver.finish()
    driver.add(Request("b", prompt, 1))
    row = driver.step().rows[0]
    assert (row.token_start, row.num_tokens) == (12, 4)
    driver.finish()
    driver.check_outputs()


def test_outputs_are_reused_by_the_next_turn():
    driver = Driver(make_scheduler())
    driver.add(make_request("a", 6, 9))
    driver.finish()
    prompt = (*driver.requests["a"].prompt_token_ids, *driver.outputs["a"], 5, 5)
    # The device's model of "a" must go on for "b": its prompt is what "a" said.
    driver.add(Request("b", prompt, 1))
    driver.finish()
    assert driver.finished["b"].num_cached_tokens == 12


def test_salts_are_namespaces_and_no_salt_is_one_too():
    driver = Driver(make_scheduler())
    prompt = tuple(range(100, 121))
    for index, (salt, cached) in enumerate((("x", 0), (None, 0), ("y", 0), ("", 0), ("x", 20), (None, 20))):
        driver.add(Request(f"r{index}", prompt, 1, cache_salt=salt))
        driver.finish()
        assert driver.finished[f"r{index}"].num_cached_tokens == cached


def test_a_request_may_refuse_to_read_the_cache():
    driver = Driver(make_scheduler())
    prompt = tuple(range(100, 121))
    driver.add(Request("a", prompt, 1))
    driver.finish()
    before = driver.scheduler.stats().prefix_cache_queries
    driver.add(Request("b", prompt, 1, read_prefix_cache=False))
    assert driver.step().rows[0].token_start == 0
    driver.finish()
    assert driver.finished["b"].num_cached_tokens == 0
    assert driver.scheduler.stats().prefix_cache_queries == before


def test_equal_pages_computed_at_once_keep_the_first():
    driver = Driver(make_scheduler())
    prompt = tuple(range(100, 109))
    driver.add(Request("a", prompt, 2), Request("b", prompt, 2))
    plan = driver.step()
    first = plan.rows[0].page_ids[:2]
    driver.finish()
    driver.add(Request("c", prompt, 2))
    assert driver.step().rows[0].page_ids[:2] == first
    driver.finish()
    driver.check_outputs()


def test_page_tuples_are_built_anew_only_when_a_page_is_added():
    driver = Driver(make_scheduler())
    driver.add(make_request("a", 4, 12))
    tuples = [driver.step().rows[0].page_ids for _ in range(9)]
    assert len({id(pages) for pages in tuples}) == 3


def test_a_device_that_is_not_ready_for_the_largest_step_lowers_the_budget_of_one_plan():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler.add_request(make_request("a", 100), 0.0)
    with pytest.raises(ValueError, match="at least 4"):
        scheduler.plan(0.0, max_tokens=3)
    first = scheduler.plan(0.0, max_tokens=16)
    second = scheduler.plan(0.0)
    assert (first.num_tokens, second.num_tokens) == (16, 64)
    assert second.rows[0].token_start == 16
