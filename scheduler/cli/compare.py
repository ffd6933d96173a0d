"""Compare policies over loads and seeds, with confidence intervals; every policy sees the same requests."""

import argparse
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from scheduler.cli.classes import class_table
from scheduler.cli.outputs import add_output_arguments, check_outputs, write_outputs
from scheduler.cli.policies import PolicyChoice, parse_policies
from scheduler.cli.progress import ProgressBar
from scheduler.cli.saturation import Rates, rates_of
from scheduler.cli.setup import Setup, add_engine_arguments, setup_of
from scheduler.cli.workload import WorkloadChoice, add_workload_arguments, workload_of
from scheduler.errors import ConfigError
from scheduler.reports import Objectives, Summary, comparison_table, summarise
from scheduler.reports import compare as compare_runs

# What a terminal has room for.
COLUMNS = ("requests_per_sec", "ttft_p50_secs", "ttft_p99_secs", "itl_p99_secs", "preemptions")
LOADS = (0.7, 0.9, 1.1)


@dataclass(frozen=True)
class _Job:
    """One run, complete in itself."""

    setup: Setup
    workload: WorkloadChoice
    policy: PolicyChoice
    load: str
    rate: float
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--policies", default="fcfs,priority,sjf,fair", help="such as fcfs,sjf(prefill_weight=0.1)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--loads",
        metavar="L,L",
        help=f"shares of what these engines can do ({','.join(map(str, LOADS))} if nothing is said)",
    )
    load.add_argument("--rates", metavar="R,R", help="requests a second; of a trace, factors of its own pace")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell, with seeds 0, 1, …")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; the results are the same")
    add_workload_arguments(parser)
    add_engine_arguments(parser)
    add_output_arguments(parser, single=False)


def run(options: argparse.Namespace) -> None:
    """Simulate all, and print a table."""
    setup, workload, policies = setup_of(options), workload_of(options), parse_policies(options.policies)
    if options.seeds < 1 or options.jobs < 1:
        raise ConfigError("--seeds and --jobs must be at least 1")
    for policy in policies:
        policy.configured(setup.config)
    check_outputs(options)
    rates = rates_of(
        setup,
        workload,
        0,  # one rate for all seeds of a load: it is a property of the engines, not of the draw
        rates=_numbers("--rates", options.rates),
        loads=_numbers("--loads", options.loads),
        default_loads=LOADS,
    )
    print(_heading(setup, workload, policies, rates, options.seeds), flush=True)
    jobs = [
        _Job(setup, workload, policy, level, rate, seed)
        for level, rate in rates.by_level.items()
        for seed in range(options.seeds)
        for policy in policies
    ]
    bar = ProgressBar("comparing", len(jobs))
    summaries = []
    for summary in _run_all(jobs, options.jobs):
        summaries.append(summary)
        bar.update(len(summaries))
    bar.close()
    comparison = compare_runs(summaries, metrics=columns(setup.objectives))
    print(comparison_table(comparison))
    if (classes := class_table(comparison)) is not None:
        print(classes)
    write_outputs(options, f"{options.policies}: {workload.kind}", summaries, setup.objectives)


def columns(objectives: Objectives) -> tuple[str, ...]:
    """The metrics of a table on a terminal; files have them all."""
    has_objectives = objectives.ttft_secs is not None or objectives.itl_secs is not None
    return (*COLUMNS, "attainment" if has_objectives else "jain_timely")


def _heading(
    setup: Setup, workload: WorkloadChoice, policies: Sequence[PolicyChoice], rates: Rates, num_seeds: int
) -> str:
    """What is simulated, in a few lines."""
    levels = "loads" if rates.capacity is not None else "rates"
    counts = [f"{len(policies)} policies" if len(policies) > 1 else "1 policy"]
    if not workload.has_own_rate:
        counts.append(f"{len(rates.by_level)} {levels}" if len(rates.by_level) > 1 else f"1 {levels[:-1]}")
    counts.append(f"{num_seeds} seeds" if num_seeds > 1 else "1 seed")
    num_runs = len(policies) * len(rates.by_level) * num_seeds
    lines = [
        f"{' × '.join(counts)} = {num_runs} {'runs' if num_runs > 1 else 'run'}, "
        f"each of {workload.num_requests} requests ({workload.kind}), the same for every policy",
        setup.describe(),
    ]
    if rates.capacity is not None:
        loads = ", ".join(f"{load} is {rate:.3g}" for load, rate in rates.by_level.items())
        lines.append(f"capacity {rates.capacity:.3g} requests/s (fcfs, all requests at once); load {loads} requests/s")
    elif not workload.has_own_rate:
        lines.append(f"load: {'requests/s' if workload.path is None else f'times the pace of {workload.path}'}")
    return "\n".join(lines) + "\n"


def _numbers(name: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text!r}: write numbers with commas between") from None


def _run_all(jobs: Sequence[_Job], num_processes: int) -> Iterator[Summary]:
    if num_processes == 1 or len(jobs) == 1:
        yield from map(_run, jobs)
        return
    size = min(num_processes, len(jobs))
    with ProcessPoolExecutor(size, get_context("spawn"), initializer=_end_at_interrupt) as pool:
        yield from pool.map(_run, jobs)


def _end_at_interrupt() -> None:
    """Ctrl-C goes to every process; only the first has something to say about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(job: _Job) -> Summary:
    result = job.setup.run(job.policy, job.workload.make(job.rate, job.seed), seed=job.seed)
    result.labels |= {"workload": job.workload.kind, "load": job.load, "seed": str(job.seed)}
    return summarise(result, job.setup.objectives)
