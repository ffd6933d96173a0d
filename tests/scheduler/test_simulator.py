"""The simulator: times that can be worked out by hand, every topology, and nothing lost."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import ConfigError
from scheduler.simulation.records import Arrival
from scheduler.simulation.routers import ROUTER_NAMES, make_router
from scheduler.simulation.simulator import Simulator
from scheduler.simulation.topology import Disaggregated, Link, Pool, Unified
from tests.scheduler.simulated import ROOMY, LinearCost, Listed, by_id, poisson, simulate

WHOLE = LinearCost(1.0, 0.0)


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_further_token():
    result = simulate([Arrival("a", 5.0, 64, 3)])
    (outcome,) = result.outcomes
    assert outcome.ttft == pytest.approx(0.02 + 64 * 0.0002)
    assert outcome.itls() == pytest.approx([0.0202, 0.0202])
    assert outcome.finish_reason in ("length", "stop")
    assert (outcome.started_at, outcome.num_preemptions, result.num_steps) == (5.0, 0, 3)


def test_an_idle_engine_starts_late_and_a_busy_one_does_not():
    topology = Unified(Pool(LinearCost(idle=0.5), ROOMY))
    result = Simulator(topology, Listed([Arrival("a", 0.0, 8, 2), Arrival("b", 9.0, 8, 2)])).run()
    assert [outcome.itls() for outcome in result.outcomes] == [pytest.approx([0.0202])] * 2
    assert [outcome.ttft for outcome in result.outcomes] == pytest.approx([0.5 + 0.0216] * 2)


def test_a_step_is_planned_before_the_results_of_the_one_before_are_known():
    """Bounded by 9 tokens but stopping at 2: the device computes one row more, whose token nobody sees."""
    arrivals = [Arrival("a", 0.0, 8, 2, max_new_tokens=9)]
    results = [simulate(arrivals, pipelined=pipelined) for pipelined in (True, False)]
    assert [result.num_steps for result in results] == [3, 2]
    assert [len(result.outcomes[0].token_times) for result in results] == [2, 2]
    assert {result.outcomes[0].finish_reason for result in results} == {"stop"}


def test_arrivals_wait_for_the_step_under_way():
    arrivals = [Arrival("a", 0.0, 8, 3), Arrival("b", 0.5, 8, 1)]
    result = Simulator(Unified(Pool(WHOLE, ROOMY)), Listed(arrivals)).run()
    outcomes = by_id(result)
    assert outcomes["b"].started_at == 1.0
    assert outcomes["b"].first_token_at == 2.0


def test_equal_prefixes_are_found_again_and_only_as_far_as_they_agree():
    config = replace(ROOMY, page_size=16)
    arrivals = [
        Arrival("a", 0.0, 64, 2, hash_ids=(1, 2, 3, 4), block_size=16),
        Arrival("b", 5.0, 64, 2, hash_ids=(1, 2, 7, 8), block_size=16),
        Arrival("c", 9.0, 60, 2, hash_ids=(1, 2, 3), block_size=16),
        Arrival("d", 12.0, 64, 2),
    ]
    result = simulate(arrivals, config)
    assert [outcome.num_cached_tokens for outcome in result.outcomes] == [0, 32, 48, 0]
    assert result.num_prefix_hits == 80


def test_what_does_not_fit_is_refused_and_the_rest_goes_on():
    config = replace(ROOMY, max_queue_size=1, max_num_seqs=1)
    arrivals = [Arrival(name, 0.0, 8, 4) for name in "abc"] + [Arrival("huge", 0.0, 10**5, 4)]
    reasons = [outcome.finish_reason for outcome in simulate(arrivals, config).outcomes]
    assert reasons == ["length", "length", "refused", "refused"]


def test_followups_come_when_their_cause_has_ended():
    workload = Listed([Arrival("a", 0.0, 8, 1)], {"a": Arrival("b", 2.0, 8, 1)})
    result = Simulator(Unified(Pool(WHOLE, ROOMY)), workload).run()
    assert [outcome.arrival.time for outcome in result.outcomes] == [0.0, 3.0]


def test_a_run_can_be_cut_off():
    result = simulate(poisson(50, 10.0), until=2.0)
    assert result.duration <= 2.0
    assert any(outcome.finished_at is None for outcome in result.outcomes)


def test_preempted_work_is_counted_as_wasted():
    config = replace(ROOMY, num_pages=8, page_size=16, enable_prefix_reuse=False, max_num_seqs=4)
    result = simulate([Arrival(f"r{index}", 0.0, 30, 60) for index in range(3)], config)
    assert all(len(outcome.token_times) == 60 for outcome in result.outcomes)
    assert sum(outcome.num_preemptions for outcome in result.outcomes) > 0
    assert sum(outcome.num_wasted_tokens for outcome in result.outcomes) >= 30


def test_a_disaggregated_hand_off_by_hand():
    link = Link(bytes_per_second=1000.0, latency_secs=0.25, kv_bytes_per_token=10.0)
    topology = Disaggregated(Pool(WHOLE, ROOMY), Pool(WHOLE, ROOMY), link)
    arrivals = [Arrival("a", 0.0, 100, 3), Arrival("b", 0.0, 50, 3), Arrival("c", 0.0, 8, 1)]
    outcomes = by_id(Simulator(topology, Listed(arrivals)).run())
    # One step computes all prompts; a's KV takes a second to send, b's half a second after it.
    assert [outcomes[name].first_token_at for name in "abc"] == [1.0, 1.0, 1.0]
    assert outcomes["a"].transfer_seconds == pytest.approx(1.25)
    assert outcomes["b"].transfer_seconds == pytest.approx(1.75)
    assert list(outcomes["a"].token_times) == pytest.approx([1.0, 3.25, 4.25])
    assert list(outcomes["b"].token_times) == pytest.approx([1.0, 4.25, 5.25])
    assert outcomes["c"].transfer_seconds == 0.0
    assert {outcome.replica for outcome in outcomes.values()} == {"generation-0", "context-0"}


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_every_router_uses_every_replica(router):
    topology = Unified(Pool(LinearCost(), ROOMY, num_replicas=3, router=router))
    arrivals = [replace(arrival, session=f"s{index % 7}") for index, arrival in enumerate(poisson(200, 30.0))]
    result = Simulator(topology, Listed(arrivals)).run()
    assert {outcome.replica for outcome in result.outcomes} == {"engine-0", "engine-1", "engine-2"}
    assert all(len(outcome.token_times) == 64 for outcome in result.outcomes)


def test_routers_that_remember():
    shared = [Arrival(f"r{i}", float(i), 64, 2, hash_ids=(i % 2, 5, 6, 7), block_size=16) for i in range(12)]
    hits = {}
    for router in ("round_robin", "kv_cache_aware"):
        topology = Unified(Pool(LinearCost(), ROOMY, num_replicas=3, router=router))
        hits[router] = Simulator(topology, Listed(shared)).run().num_prefix_hits
    assert hits["kv_cache_aware"] == 10 * 48
    assert hits["round_robin"] < hits["kv_cache_aware"]
    talk = [Arrival(f"r{i}", float(i), 8, 2, session=f"s{i % 5}") for i in range(40)]
    topology = Unified(Pool(LinearCost(), ROOMY, num_replicas=3, router="conversation"))
    homes: dict[str | None, set[str]] = {}
    for outcome in Simulator(topology, Listed(talk)).run().outcomes:
        homes.setdefault(outcome.arrival.session, set()).add(outcome.replica)
    assert all(len(replicas) == 1 for replicas in homes.values())
    with pytest.raises(ConfigError, match="round_robin"):
        make_router("random", 16)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(1, 100), st.integers(1, 40), st.integers(0, 20), st.booleans()),
        min_size=1,
        max_size=25,
    ),
    policy=st.sampled_from(["fcfs", "priority", "sjf", "deadline", "fair", "mlfq", "prefix"]),
    capacity=st.sampled_from(["known_tokens", "reserve_to_completion"]),
    num_pages=st.integers(12, 40),
    disaggregated=st.booleans(),
)
def test_everybody_gets_exactly_their_tokens_in_order(requests, policy, capacity, num_pages, disaggregated):
    config = replace(
        ROOMY, waiting_queue_policy=policy, capacity_policy=capacity, num_pages=num_pages, max_num_seqs=4, page_size=16
    )
    arrivals = [
        Arrival(
            f"r{index}", time, inputs, outputs, max_new_tokens=outputs + slack, priority=float(high), tenant=str(high)
        )
        for index, (time, inputs, outputs, slack, high) in enumerate(sorted(requests))
    ]
    pool = Pool(LinearCost(), config)
    topology = Disaggregated(pool, pool, Link(1e6, 0.01, 100.0)) if disaggregated else Unified(pool)
    runs = [Simulator(topology, Listed(arrivals)).run() for _ in range(2)]
    for outcome in runs[0].outcomes:
        times = list(outcome.token_times)
        assert len(times) == outcome.arrival.output_length
        assert times == sorted(times)
        assert outcome.started_at is not None
        assert outcome.arrival.time <= outcome.started_at < times[0]
        assert outcome.finish_reason in ("stop", "length")
    assert repr(runs[0]) == repr(runs[1])
