"""Traces: what is written is read again, Mooncake's own lines are understood, what is wrong is refused."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler import ConfigError
from scheduler.simulation.records import Arrival
from scheduler.simulation.simulator import Simulator
from scheduler.simulation.topology import Pool, Unified
from scheduler.workloads import TraceWorkload, read_trace, write_trace
from tests.scheduler.simulated import ROOMY, LinearCost

LINE = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [4, 9]}


def trace_of(folder: Path, *lines: object) -> Path:
    """A file of lines: text as it is, anything else as JSON."""
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@st.composite
def any_arrival(draw: st.DrawFn) -> Arrival:
    block_size = draw(st.integers(1, 600))
    input_length = draw(st.integers(1, 5000))
    output_length = draw(st.integers(1, 500))
    blocks = min(-(-input_length // block_size), 20)
    return Arrival(
        "any",
        draw(st.floats(0.0, 1e6)),
        input_length,
        output_length,
        tuple(draw(st.lists(st.integers(0, 1 << 40), max_size=blocks))),
        block_size,
        draw(st.one_of(st.none(), st.integers(output_length, 1000))),
        draw(st.floats(0.0, 1.0)),
        draw(st.one_of(st.none(), st.text())),
        draw(st.one_of(st.none(), st.text())),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(arrivals=st.lists(any_arrival(), max_size=8))
def test_what_is_written_is_read_again(tmp_path, arrivals):
    path = tmp_path / "round.jsonl"
    assert write_trace(path, arrivals) == len(arrivals)
    again = list(read_trace(path))
    for index, (given_arrival, read) in enumerate(zip(arrivals, again, strict=True)):
        bound = given_arrival.max_new_tokens or given_arrival.output_length
        assert read.time == pytest.approx(given_arrival.time, rel=1e-12)
        assert replace(read, time=0.0) == replace(given_arrival, request_id=f"r{index}", time=0.0, max_new_tokens=bound)


def test_a_written_trace_is_written_the_same_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_trace(first, [Arrival("a", 0.1, 30, 4, (1, 2), 16, tenant="b"), Arrival("b", 0.3, 30, 4)])
    write_trace(second, read_trace(first))
    write_trace(tmp_path / "third", read_trace(second))
    assert second.read_bytes() == (tmp_path / "third").read_bytes()


def test_mooncakes_four_fields_are_enough(tmp_path):
    (arrival,) = read_trace(trace_of(tmp_path, LINE))
    assert arrival == Arrival("r0", 1.5, 700, 3, (4, 9), 512, 3, 0.5, None, None)


def test_other_fields_and_empty_lines_are_left_alone(tmp_path):
    recorded = {**LINE, "ttft_ms": None, "finish_reason": "stop", "queue_ms": {"odd": []}, "tenant": "t1"}
    (arrival,) = read_trace(trace_of(tmp_path, "", recorded, "  "))
    assert (arrival.request_id, arrival.tenant, arrival.input_length) == ("r1", "t1", 700)


def test_what_was_aborted_at_once_counts_as_one_token(tmp_path):
    (arrival,) = read_trace(trace_of(tmp_path, {**LINE, "output_length": 0, "max_new_tokens": 64}))
    assert (arrival.output_length, arrival.max_new_tokens) == (1, 64)


def test_a_recording_out_of_order_is_put_in_order_and_counts_from_its_first(tmp_path):
    path = trace_of(
        tmp_path, *({**LINE, "timestamp": stamp, "input_length": 600 + stamp} for stamp in (70, 20, 50, 20))
    )
    arrivals = list(TraceWorkload(path).arrivals())
    assert [arrival.time for arrival in arrivals] == pytest.approx([0.0, 0.0, 0.03, 0.05])
    assert [arrival.request_id for arrival in arrivals] == ["r1", "r3", "r2", "r0"]
    assert [arrival.input_length for arrival in arrivals] == [620, 620, 650, 670]


def test_speedup_and_limit(tmp_path):
    path = trace_of(tmp_path, *({**LINE, "timestamp": stamp} for stamp in (1000, 3000, 2000)))
    assert [arrival.time for arrival in TraceWorkload(path, speedup=4.0).arrivals()] == [0.0, 0.25, 0.5]
    # The first by time, not by line.
    assert [arrival.time for arrival in TraceWorkload(path, limit=2).arrivals()] == [0.0, 1.0]
    assert len(list(TraceWorkload(path, limit=9).arrivals())) == 3
    for wrong in ({"speedup": 0.0}, {"speedup": float("nan")}, {"limit": 0}, {"limit": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            TraceWorkload(path, **wrong)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(stamps=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), speedup=st.floats(0.1, 50.0))
def test_any_order_is_put_in_order(tmp_path, stamps, speedup):
    path = trace_of(tmp_path, *({**LINE, "timestamp": stamp} for stamp in stamps))
    times = [arrival.time for arrival in TraceWorkload(path, speedup=speedup).arrivals()]
    expected = [(stamp - min(stamps)) / 1000 / speedup for stamp in sorted(stamps)]
    assert times == sorted(times)
    assert times == pytest.approx(expected, abs=1e-9)


def test_a_trace_is_simulated_and_its_prefixes_hit(tmp_path):
    lines = [{**LINE, "timestamp": 1000 * index, "hash_ids": [1, 50 + index]} for index in range(4)]
    workload = TraceWorkload(trace_of(tmp_path, *lines))
    result = Simulator(Unified(Pool(LinearCost(), ROOMY)), workload).run()
    assert [outcome.num_cached_tokens for outcome in result.outcomes] == [0, 512, 512, 512]
    assert all(len(outcome.token_times) == 3 for outcome in result.outcomes)


BAD = {
    "timestamp": [None, "5", True, -1, float("nan"), float("inf"), 10**400, [], {}],
    "input_length": [None, "5", True, 0, -3, 1.5, 1 << 21, 10**30],
    "output_length": [None, "5", False, -1, 2.0, 1 << 21],
    "hash_ids": ["12", 5, {}, False, 0, "", [1.5], [-1], [None], [True], [1, 2, 3], [1 << 60]],
    "block_size": [None, 0, -1, "16", 1.0, True],
    "priority": [2, -0.1, "high", True, float("nan")],
    "max_new_tokens": [-1, "9", 2.5, True],
    "tenant": [5, ["a"], False],
    "session": [5, {"a": 1}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() for value in values],
    ids=lambda value: str(value)[:20],
)
def test_every_bad_field_is_refused_with_file_and_line(tmp_path, name, value):
    path = trace_of(tmp_path, LINE, {**LINE, name: value})
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, line 2: '{name}'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length"])
def test_a_missing_field_is_refused(tmp_path, name):
    path = trace_of(tmp_path, {key: value for key, value in LINE.items() if key != name})
    with pytest.raises(ConfigError, match=f"line 1: '{name}'"):
        list(read_trace(path))


@pytest.mark.parametrize(
    "text",
    ["{", "[1, 2]", "5", '{"timestamp": ' + "9" * 5000 + "}", "[" * 100_000, '{"timestamp": 1'],
    ids=lambda t: t[:9],
)
def test_what_is_no_json_object_is_refused_with_its_line(tmp_path, text):
    path = trace_of(tmp_path, LINE, "", text)
    with pytest.raises(ConfigError, match=r"line 3: not (JSON|a JSON object)$"):
        list(read_trace(path))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="directory"):
        list(read_trace(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        list(read_trace(tmp_path / "binary"))
    with pytest.raises(ConfigError, match="no request"):
        list(TraceWorkload(trace_of(tmp_path, "")).arrivals())


def test_a_trace_is_read_lazily(tmp_path):
    lines = read_trace(trace_of(tmp_path, LINE, "not JSON"))
    assert next(lines).input_length == 700
    with pytest.raises(ConfigError, match="line 2"):
        next(lines)


@pytest.mark.slow
def test_a_hundred_thousand_lines_are_read_in_seconds(tmp_path):
    path = tmp_path / "long.jsonl"
    arrivals = (Arrival("", index * 0.01, 6000, 200, tuple(range(index, index + 12))) for index in range(100_000))
    assert write_trace(path, arrivals) == 100_000
    started = time.process_time()
    assert sum(1 for _ in TraceWorkload(path).arrivals()) == 100_000
    assert time.process_time() - started < 8.0
