"""`python -m scheduler`: every command end to end, its files, its errors; the same seed gives the same bytes."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from scheduler.cli import COMMANDS
from scheduler.cli.policies import parse_policies
from scheduler.cli.progress import ProgressBar
from scheduler.costs import FittedCost, load_cost
from scheduler.simulation.records import Arrival
from scheduler.workloads import write_trace
from tests.scheduler.command_line import FAST, ROOT, Cli, record

BLOCKED_IMPORT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "numpy", "pydantic", "api", "model"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from scheduler.cli import main
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
"""


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


def run(*arguments: object, script: Sequence[str] = ("-m", "scheduler")) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


# Files


def test_simulate_writes_four_files(cli, tmp_path):
    page, trace, metrics, requests = (tmp_path / name for name in ("a.html", "a.json", "a.csv", "r.csv"))
    out = cli("simulate", *FAST, "--html", page, "--perfetto", trace, "--csv", metrics, "--requests-csv", requests)
    assert all(str(path) in out for path in (page, trace, metrics, requests))
    html = page.read_text()
    assert html.lstrip().lower().startswith("<!doctype html")
    assert html.rstrip().endswith("</html>")
    assert "<svg" in html
    # Complete in itself: nothing is fetched.
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|<link|url\(\s*["']?http""", html)
    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert {event["ph"] for event in events} >= {"M"}
    rows = list(csv.DictReader(requests.read_text().splitlines()))
    assert len(rows) == 30
    text = metrics.read_text()
    assert "ttft_p99_secs" in text
    assert list(csv.reader(text.splitlines()))


@pytest.mark.parametrize("workload", ["poisson", "gamma", "closed", "sessions"])
def test_the_same_seed_gives_the_same_bytes(cli, tmp_path, workload):
    seen = []
    for _ in range(2):
        files = [tmp_path / name for name in ("a.html", "a.json", "a.csv", "r.csv")]
        names = ("--html", "--perfetto", "--csv", "--requests-csv")
        outputs = [word for pair in zip(names, files, strict=True) for word in pair]
        out = cli("simulate", *FAST, "--workload", workload, "--policy", "sjf", "--predictor", "noisy:0.5", *outputs)
        seen.append((out, *(path.read_bytes() for path in files)))
    assert seen[0] == seen[1]
    assert cli("simulate", *FAST, "--workload", workload, "--seed", "1") != cli(
        "simulate", *FAST, "--workload", workload
    )


def test_the_number_of_processes_changes_nothing(cli, tmp_path):
    seen = []
    for jobs in (1, 2):
        files = [tmp_path / "a.html", tmp_path / "a.csv"]
        out = cli(
            *("compare", *FAST, "--policies", "fcfs,sjf", "--seeds", "2", "--loads", "0.8,1.2", "--jobs", jobs),
            *("--html", files[0], "--csv", files[1]),
        )
        seen.append((out, *(path.read_bytes() for path in files)))
    assert seen[0] == seen[1]


# Commands


def test_compare_prints_a_row_for_each_policy_and_load(cli):
    out = cli("compare", *FAST, "--policies", "fcfs,priority,fair", "--loads", "0.5,1.5", "--seeds", "2", "--jobs", "1")
    assert out.startswith("3 policies × 2 loads × 2 seeds = 12 runs, each of 30 requests (poisson)")
    heading, table = out.split("policies and loads\n")
    assert "1 engine of 8 slots" in heading
    assert "steps of 20 ms and 0.1 ms a token" in heading
    assert re.search(r"capacity [\d.]+ requests/s .*; load 0.5 is [\d.]+, 1.5 is [\d.]+ requests/s", heading)
    rows = [tuple(line.split()[:3]) for line in table.splitlines()[2:8]]
    assert rows == [(load, name, "2") for load in ("0.5", "1.5") for name in ("fcfs", "priority", "fair")]
    assert "TTFT by class of priority" in out
    assert max(map(len, out.splitlines())) <= 120


def test_compare_at_rates_of_a_trace_and_of_a_closed_loop(cli, tmp_path):
    out = cli("compare", *FAST, "--policies", "fcfs", "--rates", "5,2.5", "--seeds", "1", "--jobs", "1")
    assert "1 policy × 2 rates × 1 seed = 2 runs" in out
    assert "load: requests/s" in out
    write_trace(tmp_path / "trace", (Arrival("", 0.1 * index, 40, 4) for index in range(20)))
    cost = FAST[:2]
    out = cli("compare", *cost, "--policies", "fcfs,sjf", "--trace", tmp_path / "trace", "--seeds", "1", "--jobs", "1")
    assert "each of 20 requests (trace)" in out
    out = cli("compare", *FAST, "--policies", "fcfs,sjf", "--workload", "closed", "--seeds", "1", "--jobs", "1")
    assert out.startswith("2 policies × 1 seed = 2 runs")
    assert "capacity" not in out


def test_a_trace_is_simulated_whole_at_its_own_pace(cli, tmp_path):
    write_trace(tmp_path / "trace", (Arrival("", 0.01 * index, 8, 1) for index in range(700)))
    out = cli("simulate", "--cost", "constant:0.001", "--trace", tmp_path / "trace")
    assert out.startswith("700 requests (trace)")
    assert "at 1 times its own pace" in out
    assert cli("simulate", "--cost", "constant:0.001", "--trace", tmp_path / "trace", "--requests", "9").startswith(
        "9 req"
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--replicas", "3", "--router", "least_tokens"],
        ["--context", "1", "--generation", "2"],
        ["--no-pipelining", "--no-prefix-reuse", "--no-preempt-running", "--predictor", "none"],
        ["--ttft-objective", "0.5", "--itl-objective", "0.1", "--policy", "deadline"],
        ["--rate", "9", "--cost", "roofline:llama-3-8b@h200,tp=2"],
    ],
)
def test_engines_and_topologies(cli, options):
    out = cli("simulate", *FAST, *options)
    assert "30 requests (poisson) at" in out
    assert ("context and" in out) == ("--context" in options)


def test_policies_as_they_are_written():
    text = "fcfs, sjf(aging_tokens_per_second=20),fair(weights.a=2;weights.b.c=0.5, x=true, y=no)"
    choices = parse_policies(text)
    assert [choice.name for choice in choices] == ["fcfs", "sjf", "fair"]
    assert [choice.options for choice in choices] == [
        {},
        {"aging_tokens_per_second": 20},
        {"weights": {"a": 2, "b.c": 0.5}, "x": True, "y": "no"},
    ]
    assert choices[1].text == "sjf(aging_tokens_per_second=20)"


def test_policies_with_options_are_compared(cli):
    policies = "sjf,sjf(aging_tokens_per_second=20),fair(weights.a=2,weights.b=1)"
    out = cli("compare", *FAST, "--policies", policies, "--seeds", "1", "--loads", "1", "--jobs", "1")
    assert "fair(weights.a=2,weights.b=1)" in out
    assert "sjf(aging_tokens_per_second=20)" in out


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(cli, command):
    code, out, err = cli.attempt(*filter(None, [command]), "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: python -m scheduler")
    assert "(default: None)" not in out
    assert "(default: False)" not in out


def test_fit_prints_its_error_and_writes_a_model_that_simulate_accepts(cli, tmp_path):
    folder, model = record(tmp_path / "run"), tmp_path / "model.json"
    out = cli("fit", folder, folder / "steps.jsonl", "--output", model)
    assert "MAPE" in out
    assert re.search(r"^all +160 .* 0\.0%", out, re.MULTILINE)
    assert f"written to {model}" in out
    assert isinstance(load_cost(model), FittedCost)
    assert "30 requests" in cli("simulate", *FAST, "--cost", model)


def test_replay_prints_recorded_beside_simulated(cli, tmp_path):
    folder = record(tmp_path / "run")
    lines = cli("replay", folder, "--html", tmp_path / "a.html").splitlines()
    rows = {words[1]: line for line in lines if len(words := line.split()) > 3 and words[0] == "-"}
    assert {"recorded", "priority"} <= rows.keys()
    assert "25.0" in rows["recorded"]
    assert (tmp_path / "a.html").exists()
    out = cli("replay", folder, "--policies", "fcfs,sjf", "--cost", "constant:0.02", "--max-num-seqs", "2")
    assert all(name in out for name in ("recorded", "fcfs", "sjf"))
    out = cli("replay", folder, "--speedup", "4")
    assert "priority" in out
    assert not any(line.startswith("-") and "recorded" in line for line in out.splitlines())


# Processes


def test_as_a_module():
    done = run("simulate", *FAST)
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 requests" in done.stdout
    done = run("simulate", "--policy", "fcsf")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "scheduler", "simulate", *FAST]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


def test_every_command_works_with_the_standard_library_alone(tmp_path):
    folder, model = record(tmp_path / "run"), tmp_path / "model.json"
    script = tmp_path / "blocked.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BLOCKED_IMPORT}")
    for arguments in (
        ["fit", folder, "--output", model],
        ["simulate", *FAST, "--cost", model, "--html", tmp_path / "a.html", "--perfetto", tmp_path / "a.json"],
        ["compare", *FAST, "--policies", "fcfs,fair", "--seeds", "2", "--loads", "1", "--jobs", "2"],
        ["replay", folder],
    ):
        done = run(*arguments, script=("-S", str(script)))
        assert (done.returncode, done.stderr) == (0, ""), arguments[0]


class Terminal:
    """A stream that says it is a terminal, and keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_the_progress_bar_draws_over_its_line_and_takes_it_away(monkeypatch):
    times = iter([0.0, 1.0, 1.01, 2.0])
    monkeypatch.setattr("scheduler.cli.progress.time.monotonic", lambda: next(times))
    stream = Terminal()
    bar = ProgressBar("working", 4, stream)  # type: ignore[arg-type]
    for done in (1, 2, 3):
        bar.update(done)
    bar.close()
    _, first, second, *blank = stream.text.split("\r")
    assert first.startswith("working [########........................]  25 %     3 s left")
    assert " 75 %" in second
    assert len(blank[0]) >= len(second)
    assert not blank[0].strip()
