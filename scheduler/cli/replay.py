"""Replay a recorded run under the same or another policy, beside what really happened."""

import argparse
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from scheduler.cli.compare import columns
from scheduler.cli.fit import steps_of
from scheduler.cli.outputs import add_output_arguments, check_outputs, write_outputs
from scheduler.cli.policies import PolicyChoice, parse_policies
from scheduler.cli.progress import ProgressBar
from scheduler.cli.setup import Setup
from scheduler.config import SchedulerConfig
from scheduler.costs import StoredCost, fit_cost, load_cost, read_samples
from scheduler.errors import ConfigError
from scheduler.reports import Objectives, compare, comparison_table, summarise
from scheduler.simulation.records import Arrival, Outcome, RunResult
from scheduler.workloads import TraceWorkload, read_trace

RECORDED = "recorded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("recording", help="folder that a server recorded (docs/recording.md)")
    parser.add_argument("--policies", help="policies to replay under; by default the recorded one")
    parser.add_argument("--cost", help="as of simulate; by default learnt from the recording itself")
    parser.add_argument("--speedup", type=float, default=1.0, help="let the requests come so many times as fast")
    parser.add_argument("--max-num-seqs", type=int, help="slots, instead of the recorded number")
    parser.add_argument("--ttft-objective", type=float, metavar="SECONDS", help="first token")
    parser.add_argument("--itl-objective", type=float, metavar="SECONDS", help="mean time between a request's tokens")
    add_output_arguments(parser, single=False)


def run(options: argparse.Namespace) -> None:
    """Simulate and print. Raises ConfigError or OSError."""
    folder = Path(options.recording)
    check_outputs(options)
    config, recorded_policy = recorded_config(folder)
    if options.max_num_seqs is not None:
        config = replace(config, max_num_seqs=options.max_num_seqs)
    policies = parse_policies(options.policies) if options.policies else (recorded_policy,)
    objectives = Objectives(options.ttft_objective, options.itl_objective)
    setup = Setup(config=config, cost=_cost(options.cost, folder), objectives=objectives)
    results = [] if options.speedup != 1.0 else [recorded_run(folder)]
    for policy in policies:
        workload = TraceWorkload(folder / "arrivals.jsonl", speedup=options.speedup)
        bar = ProgressBar(f"replaying under {policy.text}", sum(1 for _ in read_trace(folder / "arrivals.jsonl")))
        results.append(setup.run(policy, workload, seed=0, on_progress=_into(bar)))
        bar.close()
    summaries = [summarise(result, objectives) for result in results]
    print(comparison_table(compare(summaries, metrics=columns(objectives))))
    print(f"{RECORDED}: as the server measured it; of times between tokens it kept each request's mean alone.")
    write_outputs(options, f"replay of {folder.name}", summaries, objectives)


def _into(bar: ProgressBar) -> Callable[[int, int], None]:
    return lambda ended, arrived: bar.update(ended)


def recorded_run(folder: Path) -> RunResult:
    """What really happened, as a result. Between first and last token the tokens are spread evenly."""
    outcomes = sorted(_outcomes(folder / "arrivals.jsonl"), key=lambda outcome: outcome.arrival.time)
    if not outcomes:
        raise ConfigError(f"{folder}: holds no request")
    duration = max(outcome.finished_at or outcome.arrival.time for outcome in outcomes)
    return RunResult(outcomes, duration, {"policy": RECORDED})


def _outcomes(path: Path) -> Iterator[Outcome]:
    with path.open(encoding="utf-8") as lines:
        for arrival, line in zip(read_trace(path), filter(str.strip, lines), strict=True):
            yield _outcome(arrival, json.loads(line))


def _outcome(arrival: Arrival, fields: dict[str, object]) -> Outcome:
    def seconds(name: str) -> float | None:
        value = fields.get(name)
        return arrival.time + float(value) / 1000.0 if isinstance(value, int | float) else None

    first, last = seconds("ttft_ms"), seconds("e2e_ms")
    count = fields.get("output_length")
    times = array("d")
    if first is not None and last is not None and isinstance(count, int) and count > 0:
        step = (last - first) / max(count - 1, 1)
        times.extend(first + index * step for index in range(count))
    cached, preemptions = fields.get("cached_tokens"), fields.get("num_preemptions")
    return Outcome(
        arrival,
        replica="engine-0",
        queued_at=arrival.time,
        started_at=seconds("queue_ms"),
        first_token_at=first,
        finished_at=last,
        token_times=times,
        finish_reason=str(fields.get("finish_reason", "")),
        num_cached_tokens=cached if isinstance(cached, int) else 0,
        num_preemptions=preemptions if isinstance(preemptions, int) else 0,
    )


def _cost(given: str | None, folder: Path) -> StoredCost:
    return load_cost(given) if given else fit_cost(read_samples(steps_of(str(folder)))).model


def recorded_config(folder: Path) -> tuple[SchedulerConfig, PolicyChoice]:
    """The scheduler's settings of a recording, and its policy. Raises ConfigError or OSError."""
    path = folder / "about.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        section = about["scheduler_config"]
        config = SchedulerConfig(
            max_num_seqs=section["max_num_seqs"],
            max_num_batched_tokens=section["max_num_batched_tokens"],
            max_model_len=about["max_model_len"],
            max_queue_size=section["max_queue_size"],
            capacity_policy=section.get("capacity_policy", "known_tokens"),
            preempt_running=section["preempt_running"],
            aging_per_second=section["aging_per_second"],
            num_pages=about["num_pages"],
            page_size=about["page_size"],
            enable_prefix_reuse=about["enable_prefix_reuse"],
        )
        name, policy_options = section["waiting_queue_policy"], dict(section.get("policy_options", {}))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not what a server records ({type(error).__name__}: {error})") from None
    return config, PolicyChoice(name, name, policy_options)
