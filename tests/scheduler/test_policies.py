"""The rules of `sjf`, `deadline`, `mlfq` and `prefix` on cases made by hand."""

import pytest

from scheduler import FinishReason, Request, Scheduler, SchedulerConfig
from scheduler.policies.base import Policy
from scheduler.policies.mlfq import Levels
from scheduler.policies.sjf import LengthHistory
from scheduler.queues import WaitingQueue
from tests.scheduler.driver import Driver, make_request
from tests.scheduler.policy_cases import order_of, policy, queued, request, started

# -- sjf ---------------------------------------------------------------------------------------------------------------


def test_sjf_serves_the_shortest_prediction_first_and_equal_ones_by_arrival():
    lengths = {1: 8.0, 2: 2.0, 3: 5.0, 4: 2.0}
    waiting = [request(number, predicted_new_tokens=length) for number, length in lengths.items()]
    assert queued(policy("sjf"), *waiting) == [2, 4, 3, 1]


def test_sjf_without_predictions_goes_by_the_clients_bound_and_the_prompt():
    assert queued(policy("sjf"), request(1, 4, 9), request(2, 4, 3)) == [2, 1]
    # A prompt token weighs a twentieth of an output token: 40 of them are two.
    assert queued(policy("sjf"), request(1, 44, 8), request(2, 4, 9)) == [2, 1]
    assert queued(policy("sjf"), request(1, 44, 8), request(2, 4, 11)) == [1, 2]
    assert queued(policy("sjf", prefill_weight=0), request(1, 44, 8), request(2, 4, 9)) == [1, 2]


def test_sjf_never_believes_more_than_the_clients_bound():
    history = LengthHistory()
    assert history.predict(request(1, max_new_tokens=8, predicted_new_tokens=100.0)) == 8.0


def test_sjf_ages():
    long, short = request(1, 4, 108), request(2, 4, 8)
    long.queued_at, short.queued_at = 0.0, 49.0
    assert queued(policy("sjf", aging_tokens_per_second=2.0), long, short) == [2, 1]
    short.queued_at = 51.0
    assert queued(policy("sjf", aging_tokens_per_second=2.0), long, short) == [1, 2]
    assert queued(policy("sjf"), long, short) == [2, 1]


def test_sjf_counts_what_remains_after_a_preemption():
    preempted = request(1, 4, 20, predicted_new_tokens=10.0, output_token_ids=[1] * 7)
    assert queued(policy("sjf"), request(2, 4, 20, predicted_new_tokens=4.0), preempted) == [1, 2]


def test_sjf_with_a_prediction_that_proves_too_short_counts_one_token():
    """It has drawn 15 of "10": one more is the best guess, and a longer prediction does not get worse by it."""
    overdue = request(1, 4, 20, predicted_new_tokens=10.0, output_token_ids=[1] * 15)
    order = policy("sjf", prefill_weight=0).order
    assert order.waiting_key(overdue) == 1.0
    assert queued(policy("sjf"), request(2, 4, 20, predicted_new_tokens=1.5), overdue) == [1, 2]
    assert queued(policy("sjf"), overdue, request(2, 4, 20, predicted_new_tokens=0.0)) == [1, 2], "equal: by arrival"


def ended(sequence: int, length: int, num_outputs: int, reason: FinishReason, tenant: str | None = None) -> Request:
    return request(sequence, length, 1000, output_token_ids=[1] * num_outputs, finish_reason=reason, tenant=tenant)


def test_sjf_learns_lengths_by_tenant_and_size_of_prompt():
    history = LengthHistory(weight=0.5)
    history.on_end(ended(1, 20, 100, FinishReason.STOP, "chat"))
    history.on_end(ended(2, 30, 50, FinishReason.LENGTH, "chat"))
    assert history.predict(request(3, 16, 1000, tenant="chat")) == 75.0, "16 to 31 tokens are one kind"
    assert history.predict(request(4, 32, 1000, tenant="chat")) == 1000.0
    assert history.predict(request(5, 16, 1000, tenant="code")) == 1000.0
    assert history.predict(request(6, 16, 60, tenant="chat")) == 60.0
    assert history.predict(request(7, 16, 1000, tenant="chat", predicted_new_tokens=3.0)) == 3.0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_sjf_learns_nothing_from_requests_that_were_cut_off(reason):
    history = LengthHistory()
    history.on_end(ended(1, 20, 3, reason))
    history.on_end(ended(2, 20, 0, FinishReason.LENGTH))
    assert history.predict(request(3, 20, 1000)) == 1000.0


def test_sjf_history_is_bounded():
    history = LengthHistory()
    for index in range(20_000):
        history.on_end(ended(index, 20, 5, FinishReason.STOP, f"tenant {index}"))
    assert len(history._means) <= 10_000
    assert history.predict(request(0, 20, 1000, tenant="tenant 19999")) == 5.0


def test_sjf_in_the_scheduler():
    requests = [make_request(f"r{length}", 4, length, predicted_new_tokens=float(length)) for length in (9, 2, 5)]
    assert started("sjf", *requests) == ["r2", "r5", "r9"]


# -- deadline ----------------------------------------------------------------------------------------------------------


def test_deadline_serves_the_earliest_first():
    # Due at 10, 2.5 and 3.
    waiting = [
        request(1, arrival_time=0.0, priority=0.0),
        request(2, arrival_time=2.0, priority=1.0),
        request(3, arrival_time=1.0, priority=0.5),
    ]
    assert queued(policy("deadline"), *waiting) == [2, 3, 1]
    late = request(4, arrival_time=9.6, priority=1.0)
    assert queued(policy("deadline"), late, waiting[0]) == [1, 4], "in the end the low class goes first"


def test_deadline_one_number_for_all_and_tables():
    low, high = request(1, priority=0.0, arrival_time=0.0), request(2, priority=1.0, arrival_time=1.0)
    assert queued(policy("deadline", ttft_secs=5), high, low) == [1, 2]
    order = policy("deadline", ttft_secs={"low": 0.25}, itl_secs={"high": 0}).order
    assert [order.waiting_key(waiting) for waiting in (low, high)] == [0.25, 1.5]


def test_deadline_of_a_preempted_request_is_that_of_its_next_token():
    order = policy("deadline", ttft_secs=1.0, itl_secs=0.5).order
    assert order.waiting_key(request(1, arrival_time=2.0)) == 3.0
    assert order.waiting_key(request(2, arrival_time=2.0, output_token_ids=[1] * 4)) == 5.0
    preempted = request(3, arrival_time=0.0, output_token_ids=[1] * 20)
    assert queued(policy("deadline", ttft_secs=1.0, itl_secs=0.5), preempted, request(4, arrival_time=5.0)) == [4, 3]


def test_deadline_puts_back_who_is_due_last_and_nobody_for_a_newcomer():
    eviction = policy("deadline").eviction
    urgent, lax = request(2, priority=1.0), request(1, priority=0.0)
    assert eviction.eviction_key(lax) > eviction.eviction_key(urgent)
    assert not eviction.evicts
    assert not eviction.may_evict(urgent, lax)


# -- mlfq --------------------------------------------------------------------------------------------------------------


def levels_of(chosen: Policy) -> Levels:
    assert isinstance(chosen.charge, Levels)
    return chosen.charge


def test_mlfq_long_prompts_skip_levels():
    levels = Levels(quantum=4, num_levels=4, prefill_weight=0.5)
    joined = {}
    for number, length in enumerate((1, 8, 9, 16, 17, 32, 33, 1000)):
        one = request(number + 1, length)
        levels.on_arrival(one, 0.0)
        joined[length] = levels.level(one)
    assert joined == {1: 0, 8: 0, 9: 1, 16: 1, 17: 2, 32: 2, 33: 3, 1000: 3}


def test_mlfq_quanta_used_up_demote():
    levels = Levels(quantum=2, num_levels=3, prefill_weight=0.5)
    one = request(1, 4)
    levels.on_arrival(one, 0.0)
    seen = []
    for _ in range(8):
        levels.on_computed(one, 1, True)
        seen.append(levels.level(one))
    assert seen == [0, 1, 1, 1, 1, 2, 2, 2], "quanta of 2 and 4, and the last level has none"
    levels.on_end(one)
    assert levels._level == levels._used == {}


def test_mlfq_counts_a_prompt_as_service():
    levels = Levels(quantum=2, num_levels=3, prefill_weight=0.5)
    one = request(1, 4)
    levels.on_arrival(one, 0.0)
    levels.on_computed(one, 3, False)
    assert levels.level(one) == 0
    levels.on_computed(one, 1, False)
    assert levels.level(one) == 1


def test_mlfq_serves_higher_levels_first_and_promotes_who_waited():
    chosen = policy("mlfq", quantum=1, prefill_weight=0.5, promote_after_secs=10.0)
    low, high, other = request(1, 100, queued_at=0.0), request(2, 1, queued_at=5.0), request(3, 1, queued_at=5.0)
    queue = chosen.order.make_queue()
    for waiting in (low, high, other):
        levels_of(chosen).on_arrival(waiting, waiting.queued_at)
        queue.push(waiting)
    for now, wanted, key in ((9.9, high, 0.0), (10.0, low, -1.0), (16.0, low, -1.0)):
        assert queue.peek(now) is wanted
        assert queue.key() == key
    queue.remove("r1")
    assert order_of(queue, 10.0) == [2, 3]


def demoted(chosen: Policy, **fields: object) -> Request:
    """One that runs on a lower level."""
    running = request(1, 1, **fields)
    levels_of(chosen).on_arrival(running, 0.0)
    for _ in range(100):
        levels_of(chosen).on_computed(running, 1, True)
    return running


def test_mlfq_newcomers_that_never_ran_evict_lower_levels_only():
    chosen = policy("mlfq", quantum=4)
    low, newcomer = demoted(chosen), request(2, 1)
    levels_of(chosen).on_arrival(newcomer, 0.0)
    evict = chosen.eviction.may_evict
    assert evict(newcomer, low)
    assert not evict(low, newcomer)
    assert not evict(newcomer, newcomer)
    equal = request(3, 1)
    levels_of(chosen).on_arrival(equal, 0.0)
    assert not evict(newcomer, equal)
    newcomer.num_preemptions = 1
    assert not evict(newcomer, low), "it would take turns with the other"
    assert chosen.eviction.eviction_key(low) > chosen.eviction.eviction_key(equal)


def test_mlfq_the_promoted_keep_their_place():
    chosen = policy("mlfq", quantum=4)
    promoted, newcomer = demoted(chosen, admitted_key=-1.0), request(2, 1)
    levels_of(chosen).on_arrival(newcomer, 0.0)
    assert not chosen.eviction.may_evict(newcomer, promoted)
    assert chosen.eviction.is_spared(promoted, newcomer)
    assert not chosen.eviction.is_spared(newcomer, promoted)


def test_mlfq_does_not_evict_where_the_configuration_forbids_it():
    chosen = policy("mlfq", SchedulerConfig(preempt_running=False), quantum=4)
    low, newcomer = demoted(chosen), request(2, 1)
    levels_of(chosen).on_arrival(newcomer, 0.0)
    assert not chosen.eviction.evicts
    assert not chosen.eviction.may_evict(newcomer, low)


def test_mlfq_in_the_scheduler():
    config = SchedulerConfig(
        waiting_queue_policy="mlfq", policy_options={"quantum": 4}, max_num_seqs=1, page_size=4, max_model_len=256
    )
    driver = Driver(Scheduler(config))
    driver.add(make_request("long", 4, 40))
    for _ in range(6):
        driver.step()
    driver.add(make_request("short", 4, 3))
    assert driver.step().preempted == ("long",)
    driver.finish()
    driver.check_outputs()
    assert list(driver.finished) == ["short", "long"]


# -- prefix ------------------------------------------------------------------------------------------------------------


def prefix_queue(cached: dict[str, int], **options: object) -> WaitingQueue:
    chosen = policy("prefix", **options)
    chosen.order.attach(lambda waiting: cached.get(waiting.request_id, 0))
    return chosen.order.make_queue()


def test_prefix_serves_the_longest_cached_first_and_equal_ones_by_arrival():
    queue = prefix_queue({"r2": 16, "r3": 32, "r4": 32})
    for number in range(1, 5):
        queue.push(request(number))
    assert order_of(queue) == [3, 4, 2, 1]


def test_prefix_sees_what_the_cache_holds_now():
    cached = {"r1": 16}
    queue = prefix_queue(cached)
    for number in (1, 2):
        queue.push(request(number))
    assert queue.peek(0.0).request_id == "r1"
    cached["r2"] = 32
    assert queue.peek(0.0).request_id == "r2"


def test_prefix_compares_the_oldest_few():
    queue = prefix_queue({"r3": 100}, window=2)
    for number in (1, 2, 3):
        queue.push(request(number))
    assert order_of(queue) == [1, 3, 2]


def test_prefix_bounds_the_wait():
    queue = prefix_queue({"r2": 100}, max_wait_secs=5.0)
    queue.push(request(1, queued_at=0.0))
    queue.push(request(2, queued_at=1.0))
    assert queue.peek(4.9).request_id == "r2"
    assert queue.peek(5.0).request_id == "r1"
    assert order_of(prefix_queue({"r2": 9}, max_wait_secs=0)) == []


def test_prefix_in_the_scheduler():
    shared = tuple(range(1, 17))
    first = Request("first", (*shared, 100), 2)
    alone = make_request("alone", 17, 2)
    follower = Request("follower", (*shared, 200), 2)
    assert started("prefix", first, alone, follower) == ["first", "follower", "alone"]
    assert started("prefix", *(make_request(name, 17, 2) for name in "abc")) == ["a", "b", "c"]
