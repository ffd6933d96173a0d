"""The arithmetic of the reports: percentiles, summaries, ratios, the roofline, the priority criteria."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.comparison import Level, LevelResult, ratios, roofline_share, run_level
from bench.completion_stream import TokenCounts
from bench.load import LoadResult, RequestFailure, RequestRecord
from bench.priority_verdict import HIGH, LOW, LabelledLoad, StatusCheck, verdict
from bench.roofline import MachineLimits, ModelSize, least_seconds
from bench.summary import Distribution, Spread, percentile, summarise, time_to_first_text
from bench.words import WORDS, random_prompt

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "rope_theta": 1e5,
}


def record(started=0.0, times=(1.0, 1.5, 2.5), tokens=3, label="", prompt=10, cached=None, max_tokens=3):
    return RequestRecord(label, started, times[-1] + 0.25, times, TokenCounts(prompt, tokens, cached), max_tokens)


def load(records, failures=(), ended=10.0):
    return LoadResult(0.0, ended, 0.5, tuple(records), tuple(failures))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_no_values():
    assert Distribution.of([]) is None
    assert Spread.of([]) is None
    assert math.isnan(percentile([], 50))


def test_summary_of_a_load():
    failures = [RequestFailure("", "HTTP 500", "broken"), RequestFailure("", "HTTP 500", "x")]
    summary = summarise(load([record(cached=4), record(started=0.5, max_tokens=5)], failures))
    assert (summary.requests, summary.output_tokens, summary.prompt_tokens, summary.cached_tokens) == (2, 6, 20, 4)
    assert summary.failures == {"HTTP 500": 2}
    assert summary.first_failure == "HTTP 500: broken"
    assert summary.output_tok_s == pytest.approx(0.6)
    assert summary.total_tok_s == pytest.approx(2.6)
    assert summary.client_cpu_ratio == pytest.approx(0.05)
    assert summary.short_answers == 1
    assert summary.ttft.mean == pytest.approx(0.75)
    assert (summary.itl.count, summary.itl.min, summary.itl.max) == (4, 0.5, 1.0)
    assert summary.tpot.p50 == pytest.approx(0.75)
    assert summary.e2e.max == pytest.approx(2.75)


def test_a_load_without_answers_has_no_latencies():
    summary = summarise(load([]))
    assert summary.ttft is summary.itl is summary.tpot is summary.e2e is None
    assert summary.output_tok_s == 0


def test_answers_of_one_token_have_no_gaps():
    summary = summarise(load([record(times=(1.0,), tokens=1)]))
    assert summary.itl is summary.tpot is None
    assert summary.ttft.p99 == 1.0


def test_output_tokens_without_usage_are_events():
    alone = RequestRecord("", 0.0, 3.0, (1.0, 2.0), TokenCounts(None, None, None), 2)
    assert alone.output_tokens == 2
    assert summarise(load([alone])).mean_prompt_tokens is None


async def test_servers_alternate_and_ratios_stay_within_a_round():
    calls = []

    async def run_once(name, level):
        calls.append(name)
        pace = 1.0 if name == "ours" else 2.0
        drift = len(calls)
        return summarise(load([record(times=(pace * drift, 2 * pace * drift), tokens=2)], ended=pace * drift))

    result = await run_level(["ours", "theirs"], Level("concurrency", 8), 3, run_once)
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    (row,) = ratios(result)
    assert (row.name, row.other) == ("ours", "theirs")
    assert row.output_tok_s.min <= row.output_tok_s.median <= row.output_tok_s.max
    assert row.output_tok_s.max == pytest.approx(4.0)
    assert row.ttft_p50.min == pytest.approx(0.25)


def test_ratios_need_both_sides():
    empty = summarise(load([]))
    (row,) = ratios(LevelResult(Level("concurrency", 1), {"a": [summarise(load([record()]))], "b": [empty]}))
    assert row.output_tok_s is row.ttft_p50 is row.tpot_p50 is None


def test_size_of_the_default_model():
    size = ModelSize.from_server_info({"architecture": SMOLLM2, "weights": {"dtype": "bfloat16", "digest": "x"}})
    assert size.layer_parameters + size.head_parameters == pytest.approx(134.5e6, rel=0.001)
    assert size.bytes_per_step == pytest.approx(269e6, rel=0.001)


@pytest.mark.parametrize("info", [{}, {"architecture": {}}, {"architecture": SMOLLM2, "weights": {"dtype": "int3"}}])
def test_unknown_model_size(info):
    assert ModelSize.from_server_info(info) is None


def test_roofline_takes_the_later_bound():
    machine = MachineLimits("cpu", "bfloat16", read_bytes_per_sec=100.0, matmul_flops_per_sec=1000.0)
    model = ModelSize(layer_parameters=10.0, head_parameters=5.0, dtype="bfloat16")
    assert least_seconds(machine, model, prompt_tokens=0, output_tokens=8, concurrency=1) == pytest.approx(8 * 0.3)
    assert least_seconds(machine, model, prompt_tokens=1000, output_tokens=8, concurrency=8) == pytest.approx(20.24)
    summary = summarise(load([record(tokens=8, prompt=0)], ended=4.8))
    assert roofline_share(summary, Level("concurrency", 1), machine, model) == pytest.approx(0.5)
    assert roofline_share(summary, Level("rate", 1), machine, model) is None


def labelled(high, low, wall=1.0, failures=()):
    records = [record(times=(high, high + 0.1), label=HIGH), record(times=(low, low + 0.1), label=LOW)]
    return LabelledLoad.of(load(records, failures, ended=wall), ramp_secs=0.0)


def test_priority_criteria():
    alone = Distribution.of([0.1])
    checks = [StatusCheck("5", 400, 400), StatusCheck("1.0", 200, 200)]
    good = verdict(alone, labelled(0.3, 3.3), labelled(1.0, 1.01), checks)
    assert all(criterion.passed for criterion in good)
    assert [round(criterion.value, 2) for criterion in good[:4]] == [11.0, 3.0, 1.0, 0.01]
    slow = labelled(0.6, 3.3, wall=1.1, failures=[RequestFailure("", "timeout", "")])
    bad = verdict(alone, slow, labelled(1.0, 1.2), [StatusCheck("5", 400, 200)])
    assert not any(criterion.passed for criterion in bad)


def test_what_was_not_measured_fails():
    nothing = LabelledLoad.of(load([]), 0.0)
    criteria = verdict(None, nothing, nothing, [])
    assert [criterion.passed for criterion in criteria] == [False, False, False, False, True]


def test_the_ramp_is_left_out():
    early = record(started=0.5, times=(1.0, 2.0), label=HIGH)
    late = record(started=3.0, times=(7.0, 8.0), label=HIGH)
    assert LabelledLoad.of(load([early, late]), ramp_secs=1.0).high == time_to_first_text([late])


def test_words_are_unique_and_prompts_repeat_with_their_seed():
    assert len(set(WORDS)) == len(WORDS) >= 200
    assert random_prompt(random.Random(5), 9) == random_prompt(random.Random(5), 9)
    assert len(random_prompt(random.Random(6), 1024).split(" ")) == 1024
