"""`python -m bench.priority`: whether a server serves urgent requests first, and what that costs the others.

Three runs: one client alone (the uncontended TTFT); many clients, each request HIGH or LOW at random; and the control,
the same with one priority for all, where the labels must make no difference. `bench/priority_verdict.py` judges.
bench/README.md shows how it is used.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.http_client import HttpClient
from bench.load import Limits, LoadResult, closed_loop
from bench.options import add_load_options, positive_int, run_bounded
from bench.priority_verdict import HIGH, LOW, Criterion, LabelledLoad, StatusCheck, failures_by_reason, verdict
from bench.summary import Distribution, time_to_first_text
from bench.targets import Target, ask, authorization, with_model
from bench.workload import PlannedRequest, Workload

MAX_REQUESTS = 1_000_000
PAUSE_BETWEEN_RUNS_SECS = 1.0
DESCRIPTION = "Do urgent requests come first, and what does that cost the others?"


@dataclass(frozen=True, slots=True)
class Probe:
    """Everything that was measured."""

    uncontended: Distribution | None
    prioritised: LabelledLoad
    control: LabelledLoad
    checks: Sequence[StatusCheck]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m bench.priority", description=DESCRIPTION)
    result.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    result.add_argument("--concurrency", type=positive_int, default=160, help="clients (%(default)s)")
    result.add_argument("--high", type=float, default=1.0, help="the priority of HIGH (%(default)s)")
    result.add_argument("--low", type=float, default=0.0, help="the priority of LOW (%(default)s)")
    result.add_argument("--equal", type=float, default=0.5, help="the priority of all in the control (%(default)s)")
    result.add_argument("--ramp", type=float, default=0.0, help="leave out requests of the first seconds (%(default)s)")
    result.add_argument("--alone", type=positive_int, default=12, help="requests of the lone client (%(default)s)")
    result.add_argument("--no-status-checks", action="store_true", help="for servers with another range of priorities")
    add_load_options(result, duration=60.0)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every criterion is met, 1 otherwise."""
    options = parser().parse_args(arguments)
    return run_bounded(_probe_and_report(options))


async def _probe_and_report(options: argparse.Namespace) -> int:
    target = Target.parse(f"server={options.url}")
    async with target.client(authorization(options.api_key_env)) as client:
        model = options.model or (await with_model(target, client)).model
        workload = Workload(
            model=model,
            prompt_len=options.prompt_len,
            max_tokens=options.max_tokens,
            route=options.route,
            temperature=options.temperature,
            ignore_eos=not options.no_ignore_eos,
            extra=options.extra,
        )
        probe = await _probe(options, client, workload)
    criteria = verdict(probe.uncontended, probe.prioritised, probe.control, probe.checks)
    _print(Console(), probe, criteria)
    if options.json:
        document = _document(options, model, probe, criteria)
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(criterion.passed for criterion in criteria) else 1


async def _probe(options: argparse.Namespace, client: HttpClient, workload: Workload) -> Probe:
    rng = Random(options.seed)
    checks = [] if options.no_status_checks else await _status_checks(client, workload, rng)
    uncontended = await _run_alone(options, client, workload, rng)
    await asyncio.sleep(PAUSE_BETWEEN_RUNS_SECS)
    prioritised = await _run_labelled(options, client, workload, rng, {HIGH: options.high, LOW: options.low})
    await asyncio.sleep(PAUSE_BETWEEN_RUNS_SECS)
    control = await _run_labelled(options, client, workload, rng, {HIGH: options.equal, LOW: options.equal})
    return Probe(
        uncontended, LabelledLoad.of(prioritised, options.ramp), LabelledLoad.of(control, options.ramp), checks
    )


async def _status_checks(client: HttpClient, workload: Workload, rng: Random) -> list[StatusCheck]:
    """A priority out of range is refused; one in range, and none at all, are served."""
    checks = []
    for sent, fields, expected in (("5", {"priority": 5}, 400), ("1.0", {"priority": 1.0}, 200), ("absent", {}, 200)):
        body = json.loads(workload.request(rng).body) | {"max_tokens": 1, "stream": False} | fields
        del body["stream_options"]
        answer = await ask(client, workload.request(rng).path, body)
        checks.append(StatusCheck(sent, expected, answer.status))
    return checks


async def _run_alone(
    options: argparse.Namespace, client: HttpClient, workload: Workload, rng: Random
) -> Distribution | None:
    """TTFT of one client; its first request only warms the server up."""
    limits = Limits(options.alone + 1, options.duration, options.drain)
    result = await closed_loop(client, lambda: workload.request(rng), 1, limits)
    return time_to_first_text(result.records[1:])


async def _run_labelled(
    options: argparse.Namespace, client: HttpClient, workload: Workload, rng: Random, priorities: dict[str, float]
) -> LoadResult:
    def next_request() -> PlannedRequest:
        label = rng.choice((HIGH, LOW))
        return workload.request(rng, label, priorities[label])

    limits = Limits(MAX_REQUESTS, options.duration, options.drain)
    return await closed_loop(client, next_request, options.concurrency, limits)


def _print(console: Console, probe: Probe, criteria: Sequence[Criterion]) -> None:
    table = Table(title="TTFT, milliseconds", title_justify="left")
    for heading in ("run", "label"):
        table.add_column(heading)
    for heading in ("answered", "p50", "p95", "output tok/s"):
        table.add_column(heading, justify="right")
    table.add_row("alone", "", *_ttft_cells(probe.uncontended), "-")
    for name, load in (("priorities", probe.prioritised), ("control", probe.control)):
        table.add_row(name, HIGH, *_ttft_cells(load.high), f"{load.summary.output_tok_s:.1f}")
        table.add_row(name, LOW, *_ttft_cells(load.low), "")
    console.print(table)
    verdicts = Table(title="criteria", title_justify="left")
    verdicts.add_column("criterion")
    verdicts.add_column("measured", justify="right")
    verdicts.add_column("must be")
    verdicts.add_column("verdict")
    for criterion in criteria:
        word = "[green]PASS[/]" if criterion.passed else "[red]FAIL[/]"
        verdicts.add_row(criterion.name, f"{criterion.value:.3g}", criterion.bound, word)
    console.print(verdicts)
    for name, message in failures_by_reason({"priorities": probe.prioritised, "control": probe.control}).items():
        console.print(f"{name}: first failure: {message}", markup=False, style="red")


def _ttft_cells(values: Distribution | None) -> tuple[str, str, str]:
    if values is None:
        return "0", "-", "-"
    return str(values.count), f"{values.p50 * 1e3:.1f}", f"{values.p95 * 1e3:.1f}"


def _document(options: argparse.Namespace, model: str, probe: Probe, criteria: Sequence[Criterion]) -> dict[str, Any]:
    """The JSON report; a value that could not be measured is null."""
    return {
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "model": model,
        **asdict(probe),
        "low_over_high_ttft_p50": _number(probe.prioritised.low_over_high),
        "criteria": [asdict(criterion) | {"value": _number(criterion.value)} for criterion in criteria],
        "passed": all(criterion.passed for criterion in criteria),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main())
