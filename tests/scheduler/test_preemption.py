"""Who is put back, for whom, and what becomes of it."""

import pytest

from scheduler import RequestStatus
from tests.scheduler.driver import Driver, make_request, make_scheduler


def priority_driver(depth: int = 0, **fields: object) -> Driver:
    return Driver(make_scheduler(**{"waiting_queue_policy": "priority", "max_num_seqs": 2, **fields}), depth)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_higher_newcomer_takes_the_slot_of_the_lowest_and_latest(depth):
    driver = priority_driver(depth, max_num_seqs=3)
    driver.add(make_request("old", priority=0.2, max_new_tokens=30))
    driver.add(make_request("mid", priority=0.4, max_new_tokens=30))
    driver.add(make_request("new", priority=0.2, max_new_tokens=30))
    driver.step()
    driver.add(make_request("high", priority=1.0))
    plan = driver.step()
    assert plan.preempted == ("new",)
    assert driver.running == ["old", "mid", "high"]
    assert "high" in {row.request_id for row in plan.rows}
    driver.finish()
    driver.check_outputs()
    assert driver.requests["new"].num_preemptions == 1


@pytest.mark.parametrize("fields", [{"preempt_running": False}, {"waiting_queue_policy": "fcfs"}])
def test_no_eviction_unless_the_policy_says_so(fields):
    driver = priority_driver(max_num_seqs=1, **fields)
    driver.add(make_request("low", priority=0.0, max_new_tokens=12))
    driver.step()
    driver.add(make_request("high", priority=1.0))
    driver.step()
    assert driver.running == ["low"]
    driver.finish()
    assert driver.scheduler.stats().num_preemptions == 0


def test_equal_priority_never_preempts_for_admission_however_it_has_aged():
    driver = priority_driver(max_num_seqs=1, aging_per_second=10.0)
    driver.add(make_request("a", priority=0.5, max_new_tokens=40))
    driver.step()
    driver.add(make_request("b", priority=0.5))
    for _ in range(20):
        driver.step()
    assert driver.running == ["a"]


def test_ageing_alone_never_evicts():
    driver = priority_driver(max_num_seqs=1, aging_per_second=10.0)
    driver.add(make_request("high", priority=0.6, max_new_tokens=40))
    driver.step()
    driver.add(make_request("low", priority=0.5))
    for _ in range(20):
        driver.step()
    assert driver.running == ["high"]


def test_running_time_is_not_waiting_time():
    """A low request that started at once is evicted even when it has lived long, and the newcomer is who starts."""
    driver = priority_driver(max_num_seqs=1, aging_per_second=1.0)
    driver.add(make_request("low", priority=0.0, max_new_tokens=60))
    for _ in range(25):
        driver.step()
    driver.add(make_request("high", priority=1.0, max_new_tokens=3))
    plan = driver.step()
    assert plan.preempted == ("low",)
    assert [row.request_id for row in plan.rows] == ["high"]
    driver.finish()
    driver.check_outputs()


def test_who_started_because_it_had_aged_is_not_evicted_by_what_it_aged_past():
    driver = priority_driver(max_num_seqs=1, aging_per_second=1.0)
    driver.add(make_request("first", priority=0.7, max_new_tokens=12))
    driver.step()
    driver.add(make_request("low", priority=0.0, max_new_tokens=30))
    for _ in range(13):
        driver.step()
    assert driver.running == ["low"]
    driver.add(make_request("mid", priority=0.7, max_new_tokens=2))
    driver.step()
    assert driver.running == ["low"]
    driver.add(make_request("high", priority=5.0, max_new_tokens=2))
    driver.step()
    assert driver.running == ["high"]
    driver.finish()
    driver.check_outputs()


def test_nobody_is_evicted_when_that_would_not_be_enough():
    driver = priority_driver(num_pages=12, max_num_seqs=4)
    driver.add(make_request("peer", 20, 8, priority=1.0), make_request("low", 8, 8, priority=0.0))
    driver.step()
    driver.add(make_request("high", 30, 2, priority=1.0))
    plan = driver.step()
    assert plan.preempted == ()
    assert driver.running == ["peer", "low"]
    driver.finish()
    driver.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_as_few_victims_as_needed(depth):
    """The lowest has one page only; the next one alone frees enough, so the lowest is let be."""
    driver = priority_driver(depth, num_pages=12, max_num_seqs=4)
    driver.add(make_request("wide", 26, 3, priority=0.2))
    driver.add(make_request("thin", 2, 3, priority=0.1))
    driver.step()
    driver.add(make_request("high", 24, 2, priority=1.0))
    assert driver.step().preempted == ("wide",)
    driver.finish()
    driver.check_outputs()


def test_pages_that_victims_share_among_themselves_count_as_freed():
    driver = priority_driver(num_pages=12, max_num_seqs=4)
    for index in range(2):
        low = make_request("low", 30, 8, priority=0.0)
        low.request_id = f"low{index}"
        driver.add(low)
        driver.step()
    assert driver.requests["low1"].num_cached_tokens == 28
    driver.add(make_request("high", 40, 2, priority=1.0))
    assert set(driver.step().preempted) == {"low0", "low1"}
    assert driver.running == ["high"]
    driver.finish()
    driver.check_outputs()


def test_a_preempted_request_goes_before_newcomers_of_its_priority_and_after_higher_ones():
    driver = priority_driver(max_num_seqs=1)
    driver.add(make_request("a", priority=0.5, max_new_tokens=20))
    driver.step()
    driver.add(make_request("waiting", priority=0.5))
    for _ in range(4):
        driver.step()
    driver.add(make_request("high", priority=1.0, max_new_tokens=5))
    driver.step()
    assert driver.requests["a"].status is RequestStatus.PREEMPTED
    driver.add(make_request("newcomer", priority=0.5), make_request("higher", priority=0.9, max_new_tokens=3))
    order = []
    while driver.scheduler.has_work():
        driver.step()
        order += [name for name in driver.running if name not in order]
    assert order == ["high", "higher", "a", "waiting", "newcomer"]
    driver.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_decode_that_outgrows_the_pool_puts_back_the_latest(depth):
    driver = Driver(make_scheduler(num_pages=8), depth)
    driver.add(make_request("a", 12, 16), make_request("b", 12, 12))
    driver.finish()
    driver.check_outputs()
    assert driver.requests["a"].num_preemptions == 0
    assert driver.requests["b"].num_preemptions >= 1
    assert all(len(plan.preempted) <= 1 for plan in driver.plans)


def test_the_lowest_may_have_to_put_itself_back():
    driver = priority_driver(num_pages=8, max_num_seqs=4)
    driver.add(make_request("low", 10, 14, priority=0.0))
    driver.step()
    driver.add(make_request("high", 14, 10, priority=1.0))
    driver.finish()
    driver.check_outputs()
    assert driver.requests["high"].num_preemptions == 0
    assert driver.requests["low"].num_preemptions == 1


def test_resuming_finds_the_pages_that_were_let_go():
    driver = priority_driver(max_num_seqs=1)
    driver.add(make_request("low", 21, 12, priority=0.0))
    for _ in range(6):
        driver.step()
    driver.add(make_request("high", 4, 2, priority=1.0))
    driver.step()
    cached_before = driver.requests["low"].num_cached_tokens
    queries = driver.scheduler.stats().prefix_cache_queries
    driver.step()
    resumed = driver.step().rows[0]
    assert (resumed.request_id, resumed.attempt, resumed.starts) == ("low", 1, True)
    assert resumed.token_start == 24
    assert resumed.output_token_ids == tuple(driver.outputs["low"][:6])
    driver.finish()
    driver.check_outputs()
    assert driver.requests["low"].num_cached_tokens == cached_before
    assert driver.scheduler.stats().prefix_cache_queries == queries


def test_results_of_an_earlier_attempt_are_dropped_and_drawn_again():
    driver = priority_driver(depth=1, max_num_seqs=1)
    driver.add(make_request("low", 4, 6, priority=0.0))
    driver.plan()
    driver.add(make_request("high", 4, 2, priority=1.0))
    assert driver.plan().preempted == ("low",)
    assert driver.commit() == ()
    assert driver.requests["low"].output_token_ids == []
    driver.finish()
    driver.check_outputs()


def test_a_newcomer_waits_for_pages_in_quarantine_without_evicting_more():
    driver = priority_driver(depth=1, num_pages=8, max_num_seqs=4)
    driver.add(make_request("a", 14, 3, priority=0.0), make_request("b", 14, 3, priority=0.0))
    driver.plan()
    driver.add(make_request("high", 14, 3, priority=1.0))
    plan = driver.plan()
    assert plan.preempted == ("b",)
    assert driver.scheduler.pages.num_quarantined == 4
    assert driver.running == ["a"]
    driver.commit()
    assert driver.plan().preempted == ()
    assert driver.running == ["a", "high"]
    driver.commit()
    driver.finish()
    driver.check_outputs()


def test_a_result_of_an_earlier_attempt_is_stale_even_when_the_request_runs_again():
    driver = Driver(make_scheduler(), depth=1)
    driver.add(make_request("a", 9, 6))
    driver.plan()
    driver.scheduler._running.put_back(driver.requests["a"], driver.now, "of the test", None)
    assert [(row.request_id, row.attempt) for row in driver.plan().rows] == [("a", 1)]
    assert driver.commit() == ()
    driver.finish()
    driver.check_outputs()


def test_running_time_earns_no_place_in_the_queue():
    driver = priority_driver(max_num_seqs=1, aging_per_second=1.0)
    driver.add(make_request("low", priority=0.0, max_new_tokens=60))
    for _ in range(25):
        driver.step()
    driver.add(
        make_request("high", priority=1.0, max_new_tokens=3), make_request("mid", priority=0.9, max_new_tokens=2)
    )
    order: list[str] = []
    while driver.scheduler.has_work():
        driver.step()
        order += [name for name in driver.running if name not in order]
    assert order == ["high", "mid", "low"]


def test_pages_that_the_newcomer_itself_shares_do_not_count_as_freed():
    driver = priority_driver(num_pages=9, max_num_seqs=4)
    low = make_request("low", 18, 2, priority=0.0)
    driver.add(make_request("peer", 9, 4, priority=1.0), low)
    driver.step()
    high = make_request("high", 10, 2, priority=1.0)
    high.prompt_token_ids = (*low.prompt_token_ids[:16], *high.prompt_token_ids)
    driver.add(high)
    assert driver.plan().preempted == ()
    driver.commit()
    driver.finish()
    driver.check_outputs()


def test_who_started_because_it_had_aged_keeps_its_pages_too():
    driver = priority_driver(num_pages=8, max_num_seqs=2, aging_per_second=1.0)
    driver.add(make_request("first", 28, 4, priority=0.7))
    driver.step()
    driver.add(make_request("aged", 10, 14, priority=0.0))
    for _ in range(9):
        driver.step()
    driver.scheduler.check()
    assert driver.running == ["aged"]
    driver.add(make_request("mid", 12, 10, priority=0.2))
    driver.finish()
    driver.check_outputs()
    assert driver.requests["aged"].num_preemptions == 0
    assert driver.requests["mid"].num_preemptions == 1
