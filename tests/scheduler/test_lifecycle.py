"""One request from being added to its last event: limits, stopping, aborts, and two plans in flight."""

import pytest

from scheduler import (
    DuplicateRequestError,
    FinishReason,
    InvariantError,
    NeverFitsError,
    QueueFullError,
    Request,
    RequestStatus,
    RowResult,
    StepResult,
)
from tests.scheduler.driver import Driver, expected_outputs, make_request, make_scheduler


def answer(plan, *rows: RowResult) -> StepResult:
    return StepResult(plan.step_id, rows)


def test_the_queue_limit_is_all_or_none():
    scheduler = make_scheduler(max_num_seqs=1, max_queue_size=2)
    scheduler.add_requests([make_request(f"a{i}") for i in range(3)], 0.0)
    one, two = make_request("b"), make_request("c")
    with pytest.raises(QueueFullError):
        scheduler.add_request(one, 0.0)
    scheduler.abort("a0", 0.0)
    with pytest.raises(QueueFullError):
        scheduler.add_requests([one, two], 0.0)
    assert scheduler.get("b") is None
    scheduler.add_request(one, 0.0)
    assert scheduler.get("b") is one
    scheduler.check()


def test_what_never_fits_is_refused_with_the_numbers():
    scheduler = make_scheduler(num_pages=5, max_model_len=24)
    with pytest.raises(NeverFitsError, match="24"):
        scheduler.add_request(make_request("a", 20, 5), 0.0)
    with pytest.raises(NeverFitsError, match="20"):
        scheduler.add_request(make_request("a", 20, 2), 0.0)
    with pytest.raises(NeverFitsError):
        scheduler.add_requests([make_request("a", 4, 1), make_request("b", 21, 0)], 0.0)
    with pytest.raises(NeverFitsError):
        scheduler.add_request(Request("a", (), 4), 0.0)
    assert not scheduler.has_work()
    scheduler.add_request(make_request("a", 20, 1), 0.0)


@pytest.mark.parametrize(
    ("num_pages", "length", "room"), [(5, 4, 17), (5, 20, 1), (5, 21, -1), (64, 20, 4), (64, 24, 0), (64, 25, -1)]
)
def test_room_left(num_pages, length, room):
    scheduler = make_scheduler(num_pages=num_pages, max_model_len=24)
    assert scheduler.max_new_tokens_for(length) == room
    if room >= 0:
        scheduler.add_request(make_request("a", length, room), 0.0)
    with pytest.raises(NeverFitsError):
        scheduler.add_request(make_request("b", length, max(room, -1) + 1), 0.0)


def test_ids_and_objects_are_used_once():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"), 0.0)
    with pytest.raises(DuplicateRequestError):
        scheduler.add_request(make_request("a"), 0.0)
    with pytest.raises(DuplicateRequestError):
        scheduler.add_requests([make_request("b"), make_request("b")], 0.0)
    assert scheduler.get("b") is None
    request = scheduler.get("a")
    scheduler.abort("a", 0.0)
    with pytest.raises(DuplicateRequestError):
        scheduler.add_request(request, 0.0)
    scheduler.add_request(make_request("a"), 0.0)


@pytest.mark.parametrize("fields", [{"priority": float("nan")}, {"priority": float("inf")}, {"max_new_tokens": -1}])
def test_nonsense_is_refused(fields):
    scheduler = make_scheduler(waiting_queue_policy="priority")
    with pytest.raises(ValueError, match="must"):
        scheduler.add_request(make_request("a", **fields), 0.0)
    assert not scheduler.has_work()


def test_length_ends_a_request_with_its_last_token():
    driver = Driver(make_scheduler())
    driver.add(make_request("a", 4, 3))
    driver.finish()
    event = driver.finished["a"]
    assert (event.finish_reason, event.token_id) == (FinishReason.LENGTH, driver.outputs["a"][-1])
    assert len(driver.outputs["a"]) == 3
    assert driver.requests["a"].status is RequestStatus.FINISHED


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("minimum", "maximum", "count", "reason"),
    [(0, 8, 3, "stop"), (3, 8, 3, "stop"), (4, 8, 8, "length"), (0, 3, 3, "stop"), (0, 2, 2, "length")],
)
def test_stop_tokens_count_from_the_minimum_on(minimum, maximum, count, reason, depth):
    driver = Driver(make_scheduler(), depth)
    stop = expected_outputs(make_request("a", 4, 8))[2]
    request = make_request("a", 4, maximum, min_new_tokens=minimum, stop_token_ids=frozenset({stop}))
    driver.add(request)
    driver.finish()
    assert len(driver.outputs["a"]) == count
    assert driver.finished["a"].finish_reason == reason


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_alone_is_computed_and_draws_nothing(depth):
    driver = Driver(make_scheduler(max_num_batched_tokens=8), depth)
    driver.add(make_request("a", 17, 0))
    driver.finish()
    assert [row.samples for plan in driver.plans for row in plan.rows] == [False] * 3
    assert (driver.finished["a"].finish_reason, driver.outputs["a"]) == (FinishReason.LENGTH, [])


def test_prompt_logprobs_arrive_chunk_by_chunk():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("a", 8, 1), 0.0)
    plan = scheduler.plan(0.0)
    (event,) = scheduler.commit(plan, answer(plan, RowResult(None, prompt_logprobs="first")), 0.0)
    assert (event.token_id, event.prompt_logprobs, event.finish_reason) == (None, "first", None)
    plan = scheduler.plan(0.0)
    (event,) = scheduler.commit(plan, answer(plan, RowResult(5, "own", "second")), 0.0)
    assert (event.token_id, event.logprobs, event.prompt_logprobs, event.finish_reason) == (
        5,
        "own",
        "second",
        "length",
    )


def test_a_row_that_failed_ends_its_request_alone():
    scheduler = make_scheduler()
    scheduler.add_requests([make_request("a"), make_request("b")], 0.0)
    plan = scheduler.plan(0.0)
    events = scheduler.commit(plan, answer(plan, RowResult(None, error="not finite"), RowResult(5)), 0.0)
    assert [(e.request_id, e.token_id, e.finish_reason, e.error) for e in events] == [
        ("a", None, FinishReason.ERROR, "not finite"),
        ("b", 5, None, None),
    ]
    scheduler.check()


def test_the_token_in_flight_is_fed_on_the_device():
    driver = Driver(make_scheduler(), depth=1)
    driver.add(make_request("a", 4, 3))
    first, second, third = driver.plan(), driver.plan(), None
    assert not first.rows[0].feeds_sampled
    assert second.rows[0].feeds_sampled
    assert (second.rows[0].token_ids, second.rows[0].token_start, second.rows[0].num_output_tokens) == ((0,), 4, 1)
    with pytest.raises(InvariantError):
        driver.scheduler.plan(0.0)
    driver.commit()
    third = driver.plan()
    assert third.rows[0].feeds_sampled
    driver.commit()
    assert driver.plan().rows == (), "the token in flight is the last one"
    assert driver.scheduler.has_work()
    driver.finish()
    driver.check_outputs()


def test_a_request_that_ends_while_in_the_next_plan_leaves_its_pages_in_quarantine():
    stop = expected_outputs(make_request("a", 4, 9))[0]
    driver = Driver(make_scheduler(max_num_seqs=1), depth=1)
    driver.add(make_request("a", 4, 9, stop_token_ids=frozenset({stop})), make_request("b", 4, 2))
    driver.plan()
    driver.plan()
    (event,) = driver.commit()
    assert event.finish_reason is FinishReason.STOP
    assert driver.scheduler.pages.num_quarantined == 2
    assert driver.scheduler.stats().pages_in_use == 2
    assert [row.request_id for row in driver.plan().rows] == ["b"]
    assert driver.commit() == (), "the row of a request that has ended is stale"
    assert driver.scheduler.pages.num_quarantined == 0
    driver.finish()
    driver.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("name", ["running", "waiting", "preempted"])
def test_abort_in_any_state(name, steps, depth):
    driver = Driver(make_scheduler(waiting_queue_policy="priority", max_num_seqs=2, max_num_batched_tokens=8), depth)
    driver.add(make_request("running", 20, 9), make_request("preempted", 6, 9, priority=0.0))
    for _ in range(2):
        driver.step()
    driver.add(make_request("high", 6, 9, priority=1.0), make_request("waiting", 6, 9))
    for _ in range(steps):
        driver.step()
    driver.abort(name)
    assert driver.finished[name].finish_reason is FinishReason.ABORT
    assert driver.scheduler.get(name) is None
    driver.finish()
    driver.check_outputs()


def test_abort_carries_the_reason_given_and_unknown_ids_do_nothing():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"), 0.0)
    event = scheduler.abort("a", 0.0, FinishReason.STOP)
    assert event is not None
    assert event.finish_reason is FinishReason.STOP
    assert scheduler.abort("a", 0.0) is None
    assert scheduler.abort("b", 0.0) is None


def test_a_late_result_is_not_credited_to_a_new_request_of_the_same_id():
    driver = Driver(make_scheduler(), depth=1)
    driver.add(make_request("a", 4, 5))
    driver.plan()
    driver.abort("a")
    driver.add(make_request("a", 6, 5))
    driver.plan()
    assert driver.commit() == ()
    driver.finish()
    driver.check_outputs()


def test_plans_are_committed_once_and_in_order():
    driver = Driver(make_scheduler(), depth=1)
    driver.add(make_request("a"))
    driver.plan()
    driver.plan()
    (first, result), (second, later) = driver.in_flight
    assert driver.scheduler.num_in_flight == 2
    with pytest.raises(InvariantError, match="order"):
        driver.scheduler.commit(second, later, 0.0)
    with pytest.raises(InvariantError, match="belong"):
        driver.scheduler.commit(first, StepResult(first.step_id, ()), 0.0)
    driver.scheduler.commit(first, result, 0.0)
    with pytest.raises(InvariantError):
        driver.scheduler.commit(first, result, 0.0)


def test_gauges_come_back_to_rest_without_another_step():
    driver = Driver(make_scheduler(), depth=1)
    driver.add(*(make_request(f"r{index}") for index in range(9)))
    driver.plan()
    driver.plan()
    for index in range(9):
        driver.abort(f"r{index}")
    while driver.in_flight:
        driver.commit()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
    assert stats.num_pages == 64
    assert not driver.scheduler.has_work()
    assert driver.scheduler.plan(0.0).rows == ()


def test_choices_of_one_call_start_in_order():
    driver = Driver(make_scheduler(waiting_queue_policy="priority", max_num_seqs=2))
    driver.add(*(make_request(f"r{index}", 4, 2) for index in range(6)))
    order: list[str] = []
    while driver.scheduler.has_work():
        order += [row.request_id for row in driver.step().rows if row.starts]
    assert order == [f"r{index}" for index in range(6)]


def test_no_digest_is_computed_twice(monkeypatch):
    calls: list[tuple[int, ...]] = []
    from scheduler import admission

    real = admission.chain_digest
    monkeypatch.setattr(admission, "chain_digest", lambda parent, ids: calls.append(tuple(ids)) or real(parent, ids))
    driver = Driver(make_scheduler(num_pages=8))
    driver.add(make_request("a", 12, 16), make_request("b", 12, 16))
    driver.finish()
    assert driver.scheduler.stats().num_preemptions > 0
    assert len(calls) == len(set(calls))
