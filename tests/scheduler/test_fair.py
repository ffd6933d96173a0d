"""`fair`: what is charged to whom, who is lifted, and the bound between two tenants that always wait."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Request, Scheduler, SchedulerConfig
from scheduler.policies.fair import TokenCounters
from tests.scheduler.driver import Driver, make_request
from tests.scheduler.policy_cases import request, started


def test_fair_charges_prompts_at_the_start_and_outputs_as_they_are_drawn():
    counters = TokenCounters(1.0, 2.0, {})
    one = request(1, 10, tenant="a", num_computed_tokens=4)
    counters.on_arrival(one, 0.0)
    assert counters.service("a") == 0.0
    counters.on_start(one, 0.0)
    assert counters.service("a") == 6.0, "what the cache held costs nothing"
    counters.on_computed(one, 6, True)
    counters.on_computed(one, 1, True)
    counters.on_computed(one, 5, False)
    assert counters.service("a") == 10.0


def test_fair_charges_a_prompt_once():
    counters = TokenCounters(1.0, 2.0, {})
    one = request(1, 10, tenant="a")
    counters.on_arrival(one, 0.0)
    counters.on_start(one, 0.0)
    one.num_preemptions = 1
    counters.on_put_back(one, 1.0)
    counters.on_start(one, 2.0)
    assert counters.service("a") == 10.0


def test_fair_divides_by_weights():
    counters = TokenCounters(1.0, 1.0, {"gold": 4.0})
    for number, tenant in enumerate(("gold", "other", None)):
        one = request(number + 1, 8, tenant=tenant)
        counters.on_arrival(one, 0.0)
        counters.on_start(one, 0.0)
    # The others were lifted to nothing: gold had left the queue with 2.
    assert [counters.service(tenant) for tenant in ("gold", "other", None)] == [2.0, 10.0, 18.0]


def test_fair_lifts_a_tenant_that_comes_back():
    counters = TokenCounters(1.0, 1.0, {})
    first = request(1, 2, tenant="away")
    counters.on_arrival(first, 0.0)
    counters.on_start(first, 0.0)
    first.slot = 0
    counters.on_end(first)
    for number in (2, 3):
        counters.on_arrival(request(number, 50, tenant="busy"), 1.0)
    counters.on_start(request(2, 50, tenant="busy"), 1.0)
    assert counters.service("busy") == 52.0, "it was lifted to what the one who left last had"
    counters.on_arrival(request(4, 2, tenant="away"), 2.0)
    assert counters.service("away") == 52.0
    counters.on_arrival(request(5, 2, tenant="away"), 2.0)
    assert counters.service("away") == 52.0, "one that has requests waiting is not lifted again"


def test_fair_takes_turns_and_goes_by_arrival_within_a_tenant():
    greedy = [make_request(f"g{index}", 4, 4, tenant="greedy") for index in range(4)]
    modest = [make_request(f"m{index}", 4, 4, tenant="modest") for index in range(2)]
    assert started("fair", *greedy, *modest) == ["g0", "m0", "g1", "m1", "g2", "g3"]


def test_fair_serves_a_heavier_tenant_more():
    gold = [make_request(f"g{index}", 4, 4, tenant="gold") for index in range(6)]
    base = [make_request(f"b{index}", 4, 4, tenant="base") for index in range(6)]
    order = started("fair", *gold, *base, options={"weights": {"gold": 3}})
    assert sum(name.startswith("g") for name in order[:4]) == 3


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), min_size=8, max_size=40),
    slots=st.integers(1, 4),
    prompt_weight=st.sampled_from([0.5, 1.0]),
    output_weight=st.sampled_from([1.0, 2.0]),
)
def test_fair_keeps_the_counters_of_two_backlogged_tenants_close(lengths, slots, prompt_weight, output_weight):
    """Sheng et al., Lemma 4.3, on the counters themselves: at every moment while both have requests waiting."""
    counters = TokenCounters(prompt_weight, output_weight, {})
    # A full batch holds prompts and outputs.
    full_batch = slots * max(prompt + outputs for prompt, outputs in lengths)
    bound = max(prompt_weight * max(prompt for prompt, _ in lengths), output_weight * full_batch)
    waiting: dict[str, list[Request]] = {"a": [], "b": []}
    for number, (prompt, outputs) in enumerate(lengths):
        one = request(number + 1, prompt, outputs, tenant="ab"[number % 2])
        counters.on_arrival(one, 0.0)
        waiting[one.tenant or ""].append(one)
    running: list[list] = []
    while waiting["a"] and waiting["b"]:
        while len(running) < slots and waiting["a"] and waiting["b"]:
            tenant = min("ab", key=lambda name: (counters.service(name), waiting[name][0].sequence))
            one = waiting[tenant].pop(0)
            counters.on_start(one, 0.0)
            running.append([one, one.max_new_tokens])
            if waiting["a"] and waiting["b"]:
                assert abs(counters.service("a") - counters.service("b")) <= bound
        for entry in running:
            counters.on_computed(entry[0], 1, True)
            entry[1] -= 1
        if waiting["a"] and waiting["b"]:
            assert abs(counters.service("a") - counters.service("b")) <= bound
        running = [entry for entry in running if entry[1]]


@pytest.mark.parametrize("aborted", [False, True])
def test_fair_forgets_a_hundred_thousand_tenants(aborted):
    counters = TokenCounters(1.0, 2.0, {})
    stays = request(1, 8, tenant="stays")
    counters.on_arrival(stays, 0.0)
    for number in range(100_000):
        one = Request(f"r{number}", (1, 2, 3), 1, tenant=f"tenant {number}")
        one.sequence = number + 2
        counters.on_arrival(one, 0.0)
        if not aborted:
            counters.on_start(one, 0.0)
            one.slot = 0
        counters.on_end(one)
    assert len(counters._counters) <= 1002
    assert set(counters._num_waiting) == set(counters._num_live) == {"stays"}
    assert counters.service("stays") == 0.0


def test_fair_in_the_scheduler_leaves_nothing_of_those_who_ended():
    config = SchedulerConfig(waiting_queue_policy="fair", max_num_seqs=2, num_pages=9, page_size=4, max_model_len=64)
    driver = Driver(Scheduler(config))
    for index in range(12):
        driver.add(make_request(f"r{index}", 3 + index, 5, tenant=f"t{index % 5}"))
        driver.step()
    driver.abort("r11")
    driver.finish()
    counters = driver.scheduler.policy.charge
    assert isinstance(counters, TokenCounters)
    assert counters._num_waiting == counters._num_live == {}
