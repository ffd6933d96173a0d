"""Random storms against the brute-force model of `driver.py`: whatever happens, every request gets its own tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import FinishReason, NeverFitsError, QueueFullError, Request, Scheduler, SchedulerConfig
from tests.scheduler.driver import Driver, expected_outputs

SHARED = tuple(range(1, 40))

requests = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 24),
        "own": st.integers(1, 12),
        "max_new_tokens": st.integers(0, 12),
        "priority": st.sampled_from([0.0, 0.5, 0.5, 1.0]),
        "salt": st.sampled_from([None, None, "a"]),
        "stops": st.sets(st.integers(1000, 1255), max_size=60),
        "min_new_tokens": st.integers(0, 4),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    min_size=5,
    max_size=50,
)
configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.sampled_from([1, 2, 3, 5]),
    max_num_batched_tokens=st.sampled_from([1, 2, 5, 7, 64]),
    max_model_len=st.just(64),
    max_queue_size=st.just(100),
    waiting_queue_policy=st.sampled_from(["fcfs", "priority"]),
    preempt_running=st.booleans(),
    num_pages=st.sampled_from([6, 9, 14, 40]),
    page_size=st.sampled_from([1, 4, 8]),
    enable_prefix_reuse=st.booleans(),
)


def build(index: int, fields: dict) -> Request:
    own = tuple(100 + index * 13 + i for i in range(fields["own"]))
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=SHARED[: fields["shared"]] + own,
        max_new_tokens=fields["max_new_tokens"],
        priority=fields["priority"],
        cache_salt=fields["salt"],
        stop_token_ids=frozenset(fields["stops"]),
        min_new_tokens=fields["min_new_tokens"],
    )


@settings(max_examples=250, deadline=None)
@given(config=configs, script=actions, depth=st.sampled_from([0, 1]))
def test_every_request_gets_its_own_tokens(config, script, depth):
    driver = Driver(Scheduler(config), depth)
    added: list[Request] = []
    aborted: set[str] = set()
    for kind, value in script:
        if kind == "add":
            request = build(len(added), value)
            try:
                driver.add(request)
                added.append(request)
            except NeverFitsError:
                driver.scheduler.check()
        elif kind == "step":
            for _ in range(value):
                driver.step()
        elif value < len(added):
            if added[value].request_id not in driver.finished:
                aborted.add(added[value].request_id)
            driver.abort(added[value].request_id)
    driver.finish()
    for request in added:
        event = driver.finished[request.request_id]
        outputs = driver.outputs[request.request_id]
        wanted = expected_outputs(request)
        if request.request_id in aborted:
            assert event.finish_reason is FinishReason.ABORT
            assert outputs == wanted[: len(outputs)]
        else:
            assert outputs == wanted
            stopped = bool(outputs) and outputs[-1] in request.stop_token_ids and len(outputs) >= request.min_new_tokens
            assert event.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@settings(max_examples=100, deadline=None)
@given(config=configs, fields=st.lists(requests, min_size=2, max_size=12), depth=st.sampled_from([0, 1]))
def test_equal_priority_starts_in_order_of_arrival(config, fields, depth):
    driver = Driver(Scheduler(config), depth)
    added = []
    for index, values in enumerate(fields):
        request = build(index, {**values, "priority": 0.5})
        try:
            driver.add(request)
            added.append(request)
        except NeverFitsError:
            pass
    started: list[str] = []
    for _ in range(3000):
        if not driver.scheduler.has_work() and not driver.in_flight:
            break
        for row in driver.step().rows:
            if row.starts and row.request_id not in started:
                started.append(row.request_id)
    # Within one plan rows are sorted by kind, so the order of starting is only fixed between plans.
    order = {request.request_id: index for index, request in enumerate(added)}
    by_step = [
        [order[row.request_id] for row in plan.rows if row.starts and row.attempt == 0] for plan in driver.plans
    ]
    firsts = [sorted(step) for step in by_step if step]
    assert sorted(started) == sorted(order)
    if config.max_num_batched_tokens > config.max_num_seqs:
        assert [i for step in firsts for i in step] == sorted(i for step in firsts for i in step)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.randoms(use_true_random=False),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.sampled_from([0, 1]),
)
def test_pages_survive_oversubscription_with_bounded_preemption(seed, policy, depth):
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64, num_pages=12, page_size=4,
        waiting_queue_policy=policy,
    )
    driver = Driver(Scheduler(config), depth)
    added = []
    for index in range(20):
        length = seed.randint(1, 28)
        request = Request(f"r{index}", tuple(seed.randint(1, 99) for _ in range(length)), seed.randint(1, 16), priority=0.5)
        driver.add(request)
        added.append(request)
    driver.finish()
    assert all(driver.outputs[r.request_id] == expected_outputs(r) for r in added)
    assert max(r.num_preemptions for r in added) <= 12


def test_queue_limit_is_all_or_none():
    config = SchedulerConfig(max_num_seqs=1, max_queue_size=2, num_pages=8, page_size=4)
    scheduler = Scheduler(config)
    scheduler.add_requests([Request(f"a{i}", (1, 2), 1) for i in range(3)], 0.0)
    with pytest.raises(QueueFullError):
        scheduler.add_requests([Request("b", (1,), 1)], 0.0)
    scheduler.abort("a0", 0.0)
    with pytest.raises(QueueFullError):
        scheduler.add_requests([Request("b", (1,), 1), Request("c", (1,), 1)], 0.0)
    assert scheduler.get("b") is None
    scheduler.add_requests([Request("b", (1,), 1)], 0.0)
    scheduler.check()
