"""Tables, CSV, pages and traces: what is in them, that they are well-formed, and that bytes do not change."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest

from scheduler.reports import (
    RUN_METRICS,
    Objectives,
    Summary,
    compare,
    comparison_table,
    run_table,
    summarise,
    timeline,
    write_html,
    write_metrics_csv,
    write_requests_csv,
    write_trace,
)
from scheduler.reports.grid import fixed, printable
from scheduler.reports.scale import Scale
from scheduler.simulation.records import RunResult
from tests.scheduler.report_runs import four_requests, outcome, run_of, with_steps

HOSTILE = '<script>alert("1")</script>&\x1b[2J\n\u202e'
EMPTY = RunResult([], 0.0)


def grid_of_runs() -> list[Summary]:
    """Two policies, two loads, three seeds; the second policy is faster by nearly the same at load 2 alone."""
    runs = []
    for load, gains in (("10", (0.0, 0.0, 0.0)), ("2", (0.10, 0.11, 0.12))):
        for seed, (ttft, gain) in enumerate(zip((1.0, 2.0, 3.0), gains, strict=True)):
            runs.append(summarise(run_of("fcfs", load, str(seed), ttft)))
            runs.append(summarise(run_of("priority", load, str(seed), ttft - gain)))
    return runs


def page(summaries: Sequence[Summary], run: RunResult | None = None, title: str = "Report") -> str:
    stream = io.StringIO()
    write_html(stream, summaries, title=title, levels=None if run is None else timeline(run))
    return stream.getvalue()


def trace(run: RunResult) -> list[dict]:
    stream = io.StringIO()
    write_trace(stream, run)
    return json.loads(stream.getvalue())["traceEvents"]


def test_numbers_and_names_as_text():
    assert [fixed(None), fixed(float("nan")), fixed(-0.001), fixed(-1.26), fixed(0.5, 1e3, 0)] == [
        "-",
        "-",
        "0.0",
        "-1.3",
        "500",
    ]
    assert printable("a\x1b\u202eb\ud800 c") == "a\ufffd\ufffdb\ufffd c"


def test_a_comparison_stars_what_differs_by_pairs():
    comparison = compare(grid_of_runs(), metrics=("ttft_p50_secs", "itl_p50_secs"))
    assert (comparison.policies, comparison.loads) == (("fcfs", "priority"), ("2", "10"))
    stars = {(row.policy, row.load): [cell.differs for cell in row.cells] for row in comparison.rows}
    assert stars.pop(("priority", "2")) == [True, False]
    assert not any(any(cells) for cells in stars.values())
    text = comparison_table(comparison)
    assert "TTFT p50 (ms)" in text
    # Mean 1.89, of values 0.99 apart: 4.3027 × 0.99 / √3.
    assert "1890.0 ± 2459.3*" in text
    lines = text.splitlines()[1:6]
    assert len({len(line) for line in lines}) == 1


def test_runs_that_cannot_be_told_apart_are_refused():
    twice = [summarise(run_of("fcfs", "1", "0", 1.0))] * 2
    with pytest.raises(ValueError, match="fcfs"):
        compare(twice)
    with pytest.raises(ValueError, match="speed"):
        compare([], metrics=("speed",))


def test_tables_of_one_run():
    text = run_table(summarise(four_requests()))
    assert text.startswith("policy fcfs, load 2, seed 1\n")
    assert "Jain's index is over 2 tenants." in text
    for run in (EMPTY, run_of("fcfs", "1", "0", 1.0), RunResult([outcome("a", 0.0, reason="refused")], 0.0)):
        text = run_table(summarise(run))
        assert "None" not in text
        assert "nan" not in text
        assert comparison_table(compare([summarise(run)]))
    assert comparison_table(compare([])).count("\n") == 4


def test_hostile_names_do_not_reach_a_terminal():
    text = run_table(summarise(RunResult([outcome("a", 0, (1,), tenant=HOSTILE), outcome("b", 0, (1,))], 1.0)))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_many_tenants_are_cut_short_and_said_so():
    requests = [outcome(f"r{index}", 0.0, (1.0,), tenant=f"t{index:03}") for index in range(60)]
    assert "10 tenants with fewer requests are left out." in run_table(summarise(RunResult(requests, 1.0)))


def test_metrics_as_tidy_csv():
    stream = io.StringIO()
    write_metrics_csv(stream, [summarise(four_requests()), summarise(EMPTY)])
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert list(rows[0]) == ["policy", "load", "seed", "scope", "group", "metric", "value"]
    found = {(row["policy"], row["scope"], row["group"], row["metric"]): row["value"] for row in rows}
    assert len(found) == len(rows)
    assert float(found["fcfs", "run", "", "ttft_mean_secs"]) == summarise(four_requests()).overall.ttft.mean
    assert found["fcfs", "class", "low", "ttft_p50_secs"] == ""
    assert found["fcfs", "tenant", "x", "requests"] == "2"
    assert found["fcfs", "run", "", "jain_over"] == "tenants"
    assert found["", "run", "", "requests"] == "0"
    assert len({metric.key for metric in RUN_METRICS}) == len(RUN_METRICS)


def test_requests_as_csv():
    run = four_requests()
    run.outcomes[0].arrival = outcome("a", 0.0, tenant=HOSTILE + "\ud800").arrival
    stream = io.StringIO()
    write_requests_csv(stream, [run, EMPTY], Objectives(1.0, 2.0))
    rows = list(csv.DictReader(io.StringIO(stream.getvalue(), newline="")))
    assert [row["request_id"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[0]["tenant"] == HOSTILE + "?"
    assert (rows[0]["max_itl_secs"], rows[0]["mean_itl_secs"], rows[0]["attained"]) == ("2.0", "1.5", "1")
    assert (rows[2]["finish_reason"], rows[2]["ttft_secs"], rows[2]["attained"]) == ("refused", "", "0")
    with pytest.raises(ValueError, match="tenant"):
        write_requests_csv(io.StringIO(), [RunResult([], 0.0, {"tenant": "x"})])


class _Tags(HTMLParser):
    """Counts elements, and checks that each is closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("summaries", "run", "figures"),
    [
        ([], None, 0),
        ([summarise(EMPTY)], EMPTY, 0),
        ([summarise(with_steps())], with_steps(), 6),
        ([summarise(run_of("fcfs", "1", "0", 1.0))], None, 5),
        (grid_of_runs(), None, 4 + 4 + 3),
        ([summarise(run_of("fcfs", load, "0", 1.0)) for load in ("light", "heavy")], None, 4 + 4 + 3),
    ],
    ids=["none", "empty", "steps", "one", "grid", "named loads"],
)
def test_a_page_is_well_formed(summaries, run, figures):
    text = page(summaries, run)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.seen.get("figure", 0) == figures
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert re.search(r"\b(nan|inf|None)\b", text) is None
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/", "")
    assert text == page(summaries, run)


def test_names_on_a_page_are_escaped():
    requests = [outcome("a", 0.0, (1.0, 2.0), tenant=HOSTILE), outcome("b", 0.0, (1.0, 3.0), tenant="y")]
    run = RunResult(requests, 3.0, {"policy": HOSTILE, "load": HOSTILE})
    for runs in ([run], [run, RunResult(requests, 3.0, {"policy": "b", "load": "1"})]):
        text = page([summarise(one) for one in runs], title=HOSTILE)
        assert "<script" not in text
        assert "&lt;script&gt;" in text
        assert "\x1b" not in text
        ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def test_axes_have_round_ticks():
    assert Scale.over([0.0, 10.0], 0, 100).ticks() == (0, 2, 4, 6, 8, 10)
    assert Scale.over([5.0], 0, 100).place(5.0) == 0
    wide = Scale.over([0.0, 0.001, 100.0], 0, 100, logarithmic=True)
    assert wide.ticks() == pytest.approx((0.001, 0.01, 0.1, 1, 10, 100))
    assert wide.place(0.0) == 0
    assert wide.place(100.0) == 100
    for low, high in ((1.1, 1.9), (3e-9, 4e-9), (0.07, 8.0), (1e-9, 1e12)):
        assert 1 <= len(Scale.over([low, high], 0, 100, logarithmic=True).ticks()) <= 12


def check_trace(events: list[dict]) -> None:
    """What Perfetto's importer of JSON needs: order, whole numbers for ids, spans that are closed and nest."""
    open_spans: dict[tuple[int, str], list[str]] = {}
    ends: dict[tuple[int, int], float] = {}
    last = 0.0
    for event in events:
        assert event["ts"] >= last
        last = event["ts"]
        assert event["pid"] >= 1
        assert isinstance(event["tid"], int)
        if event["ph"] in "be":
            stack = open_spans.setdefault((event["pid"], event["id2"]["local"]), [])
            if event["ph"] == "b":
                stack.append(event["name"])
            else:
                assert stack.pop() == event["name"]
        elif event["ph"] == "X":
            track = (event["pid"], event["tid"])
            assert event["dur"] >= 0
            assert event["ts"] >= ends.get(track, 0.0) - 1e-6
            ends[track] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert min(event["args"].values()) >= 0
        else:
            assert event["ph"] == "M"
    assert not any(open_spans.values())


def test_a_trace_of_steps_and_requests():
    events = trace(with_steps())
    check_trace(events)
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert names == {"r0": 1, "r1": 2}
    steps = [event for event in events if event["ph"] == "X"]
    assert [(step["pid"], step["ts"], step["dur"]) for step in steps] == [
        (1, 5e5, 5e5),
        (1, 1e6, 1e6),
        (2, 1.5e6, 1e6),
        (1, 7e6, 3e6),
    ]
    assert (steps[0]["name"], steps[0]["args"]["tokens"], steps[1]["args"]["rows"]) == ("prefill step", 10, 2)
    spans = [(e["ts"] / 1e6, e["ph"], e["name"]) for e in events if e.get("id2") == {"local": "0x2"}]
    assert spans[:3] == [(4.0, "b", "request"), (4.0, "b", "queued"), (4.0, "e", "queued")]
    assert spans[3:6] == [(4.0, "b", "prefill"), (6.0, "e", "prefill"), (6.0, "b", "decode")]
    assert spans[6:] == [
        (7.0, "b", "preempted"),
        (10.0, "e", "preempted"),
        (10.0, "e", "decode"),
        (10.0, "e", "request"),
    ]
    counters = {event["ts"] / 1e6: event["args"] for event in events if event["ph"] == "C"}
    assert counters[0.0] == {"running": 0, "waiting": 1, "preempted": 0}
    assert counters[6.0] == {"running": 2, "waiting": 0, "preempted": 0}
    assert counters[7.0] == {"running": 0, "waiting": 0, "preempted": 1}
    assert counters[10.0] == {"running": 0, "waiting": 0, "preempted": 0}


def test_traces_of_odd_runs():
    check_trace(trace(EMPTY))
    run = with_steps()
    run.outcomes += [
        outcome(HOSTILE, 8.0, reason="", replica=""),
        outcome("late", 8.0, (8.0,), replica=HOSTILE),
        outcome("gone", 8.0, started=8.5, reason="error"),
    ]
    run.steps += [run.steps[0]._replace(start=0.6, end=3.0), run.steps[0]._replace(start=8.25, preempted=("late", "b"))]
    run.steps.append(run.steps[3]._replace(start=5.5, end=5.6, preempted=("b",)))
    check_trace(trace(run))
    first, second = io.StringIO(), io.StringIO()
    write_trace(first, run)
    write_trace(second, run)
    assert first.getvalue() == second.getvalue()
