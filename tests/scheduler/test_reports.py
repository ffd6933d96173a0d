"""The numbers of reports, against ones computed by hand."""

import math
import time
from array import array

import pytest

from scheduler.reports import (
    Distribution,
    Objective,
    Objectives,
    attains,
    confidence_interval,
    jain_index,
    paired_difference,
    percentile,
    summarise,
    t_quantile,
    timeline,
)
from scheduler.request import priority_class
from scheduler.simulation.records import RunResult
from tests.scheduler.report_runs import four_requests, outcome, run_of, with_steps

# Two-sided 95 % quantiles as printed in tables.
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
T_TABLE |= {11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093}
T_TABLE |= {20: 2.086, 21: 2.080, 22: 2.074, 23: 2.069, 24: 2.064, 25: 2.060, 26: 2.056, 27: 2.052, 28: 2.048}
T_TABLE |= {29: 2.045, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980, 1000: 1.962}


def test_percentiles_are_linear():
    assert percentile([], 50) is None
    assert [percentile([3.0], percent) for percent in (0, 50, 100)] == [3.0, 3.0, 3.0]
    values = [10.0, 20.0, 30.0, 50.0]
    assert [percentile(values, percent) for percent in (0, 25, 50, 100)] == [10.0, 17.5, 25.0, 50.0]
    assert percentile(values, 95) == pytest.approx(47.0)


def test_a_distribution_of_nothing_is_blank():
    assert Distribution.of_sorted([]) == Distribution(0, None, None, None, None, None)
    assert Distribution.of_sorted([2.0, 4.0]) == Distribution(2, 3.0, 3.0, 3.9, 3.98, 4.0)


@pytest.mark.parametrize("degrees", T_TABLE)
def test_t_quantiles_are_the_printed_ones(degrees):
    assert t_quantile(degrees) == pytest.approx(T_TABLE[degrees], abs=5.1e-4)


def test_t_quantiles_of_other_confidences():
    assert t_quantile(1, 0.5) == pytest.approx(1.0)
    assert t_quantile(2, 0.99) == pytest.approx(9.925, abs=5e-4)
    for degrees, confidence in ((0, 0.95), (3, 0.0), (3, 1.0)):
        with pytest.raises(ValueError, match=r"degree of freedom|confidence"):
            t_quantile(degrees, confidence)


def test_confidence_intervals():
    assert confidence_interval([]) is None
    assert confidence_interval([None]) is None
    single = confidence_interval([4.0])
    assert single is not None
    assert (single.mean, single.half_width, single.excludes_zero) == (4.0, None, False)
    three = confidence_interval([1.0, None, 2.0, 3.0])
    assert three is not None
    assert (three.mean, three.count) == (2.0, 3)
    assert three.half_width == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)  # the standard deviation is 1


def test_pairs_show_what_spreads_hide():
    baseline, faster = [10.0, 20.0, 30.0], [9.0, 18.8, 29.1]
    difference = paired_difference(faster, baseline)
    assert difference is not None
    assert difference.mean == pytest.approx(-3.1 / 3)
    assert difference.excludes_zero
    same = paired_difference(baseline, baseline)
    assert same is not None
    assert not same.excludes_zero
    rounding = paired_difference([0.1 + 0.2] * 3, [0.3] * 3)
    assert rounding is not None
    assert not rounding.excludes_zero
    assert paired_difference([None, 1.0], [2.0, None]) is None
    with pytest.raises(ValueError, match="longer"):
        paired_difference([1.0], [1.0, 2.0])


def test_jain():
    assert jain_index([]) is None
    assert jain_index([0.0, 0.0]) == 1.0
    assert jain_index([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 2.0]) == pytest.approx(0.9)


def test_classes_and_objectives():
    assert [priority_class(priority) for priority in (0.0, 0.49, 0.5, 0.51, 1.0)] == [
        "low",
        "low",
        "default",
        "high",
        "high",
    ]
    a = outcome("a", 0.0, (1.0, 2.0, 4.0))  # TTFT 1, mean ITL 1.5
    assert attains(a, Objective())
    assert attains(a, Objective(1.0, 1.5))
    assert not attains(a, Objective(0.9, 1.5))
    assert not attains(a, Objective(1.0, 1.4))
    assert attains(outcome("b", 0.0, (1.0,)), Objective(1.0, 0.0))
    for reason in ("abort", "error", "refused", ""):
        assert not attains(outcome("c", 0.0, (1.0,), reason=reason), Objective())
    with pytest.raises(ValueError, match="urgent"):
        Objectives(by_class={"urgent": Objective()})


def test_a_summary_by_hand():
    summary = summarise(four_requests(), Objectives(1.0, 2.0, by_class={"high": Objective(2.0, 4.0)}))
    overall = summary.overall
    counts = overall.counts
    assert (counts.total, counts.finished, counts.refused, counts.aborted, counts.errors, counts.unfinished) == (
        4,
        2,
        1,
        1,
        0,
        0,
    )
    assert (summary.duration_secs, summary.span_secs) == (10.0, 10.0)
    assert (summary.requests_per_sec, summary.output_tok_s) == (0.2, 0.6)
    assert (overall.ttft.count, overall.ttft.p50, overall.ttft.max) == (3, 1.0, 2.0)
    assert overall.ttft.mean == pytest.approx(3.5 / 3)
    assert (overall.itl.count, overall.itl.p50, overall.itl.max) == (3, 2.0, 4.0)  # 1, 2, 4
    assert overall.itl.p95 == pytest.approx(3.8)
    assert (overall.e2e.count, overall.e2e.mean) == (2, 5.0)  # 4 and 6; the aborted one is left out
    assert (summary.queue.count, summary.queue.max) == (3, 0.5)
    assert (summary.preemptions, summary.wasted_tokens) == (1, 8)
    # a: 10 + 2, b: 20 - 5 + 1, d: 10 + 0, and 8 wasted.
    assert summary.wasted_share == pytest.approx(8 / (12 + 16 + 10 + 8))
    assert summary.prefix_hit_rate == 0.1
    assert (summary.transfers, summary.transfer_secs, summary.num_steps) == (1, 0.25, 7)
    assert (overall.attainment, overall.goodput) == (0.5, 0.2)


def test_groups_by_hand():
    summary = summarise(four_requests(), Objectives(1.0, 2.0))
    assert list(summary.by_class) == ["low", "default", "high"]
    assert list(summary.by_tenant) == ["x", "y"]
    high, low = summary.by_class["high"], summary.by_class["low"]
    assert (high.counts.finished, high.ttft.p99, high.itl.mean, high.attainment) == (1, 2.0, 4.0, 0.0)
    assert (low.counts.refused, low.ttft.count, low.ttft.p50, low.attainment) == (1, 0, None, 0.0)
    x = summary.by_tenant["x"]
    assert (x.counts.total, x.counts.aborted, x.itl.count, x.attainment, x.goodput) == (2, 1, 2, 0.5, 0.1)


def test_fairness_of_tenants_by_hand():
    fairness = summarise(four_requests()).fairness
    assert (fairness.over, fairness.count) == ("tenants", 2)
    # x: served 13 + 11 of 13 + 14; y: 22 of 22 + 11.
    assert fairness.served == pytest.approx(jain_index([24 / 27, 22 / 33]))
    # Until 10 s: x served 10·9 + 9 + 8 + 6 + 10·3.5 + 3.5 of 13·10 + 14·4; y 20·4 + 4 + 0 of 22·6 + 11·5.
    assert fairness.timely == pytest.approx(jain_index([151.5 / 186, 84 / 187]))


def test_fairness_of_one_tenant_is_over_the_commonest_class():
    requests = [outcome("a", 0.0, (1.0,), priority=0.9), outcome("b", 0.0, (2.0,), priority=0.9)]
    requests.append(outcome("c", 0.0, (1.5,)))
    fairness = summarise(RunResult(requests, 2.0)).fairness
    assert (fairness.over, fairness.count, fairness.served) == ("high requests", 2, 1.0)
    assert fairness.timely == pytest.approx(jain_index([0.5, 0.0]))


def test_an_empty_run_and_one_request():
    empty = summarise(RunResult([], 0.0))
    assert (empty.overall.counts.total, empty.requests_per_sec, empty.overall.attainment) == (0, None, None)
    assert (empty.fairness.count, empty.fairness.served, empty.by_class) == (0, None, {})
    one = summarise(run_of("fcfs", "1", "0", 0.5))
    assert (one.overall.ttft.p99, one.overall.itl.p50, one.requests_per_sec) == (0.5, 1.0, 0.4)
    refused = summarise(RunResult([outcome("a", 3.0, reason="refused")], 3.0))
    assert (refused.span_secs, refused.overall.goodput, refused.overall.attainment) == (0.0, None, 0.0)


def test_who_has_not_left_counts_to_the_end():
    waiting, decoding = outcome("a", 1.0, reason=""), outcome("b", 2.0, (3.0, 4.0), reason="")
    summary = summarise(RunResult([waiting, decoding], 9.0))
    assert (summary.span_secs, summary.overall.counts.unfinished) == (8.0, 2)
    assert summary.output_tok_s == 0.25


def test_a_timeline_by_hand():
    levels = timeline(with_steps(), num_bins=10)
    # a waits in [0, 0.5) and runs to 4; b runs in [4, 10), put back in [7, 10); d runs in [6, 6.5).
    assert levels.times == tuple(index + 0.5 for index in range(10))
    assert levels.waiting.mean == pytest.approx((0.5, *(0.0,) * 9))
    assert levels.running.mean == pytest.approx((0.5, 1, 1, 1, 1, 1, 1.5, 0, 0, 0))
    assert (levels.running.low[6], levels.running.high[6]) == (1, 2)
    assert levels.preempted.mean == pytest.approx((*(0.0,) * 7, 1, 1, 1))
    assert timeline(RunResult([], 0.0)).times == ()


@pytest.mark.slow
def test_a_long_run_takes_seconds():
    # A third of the requests, and of the time, of the longest runs that we summarise, doubled for slow machines.
    state, requests = 1, []
    for index in range(33_000):
        now, times = index * 0.01, array("d")
        at = now
        for _ in range(64):
            state = (state * 1103515245 + 12345) % 2147483648
            at += 0.01 + state / 2147483648 * 0.05
            times.append(at)
        request = outcome(f"r{index}", now, times, priority=(0.2, 0.5, 0.9)[index % 3], tenant=f"t{index % 7}")
        requests.append(request)
    started = time.process_time()
    summary = summarise(RunResult(requests, at), Objectives(1.0, 0.05))
    assert time.process_time() - started < 10
    assert summary.overall.itl.count == 33_000 * 63
