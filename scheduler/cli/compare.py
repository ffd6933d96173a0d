"""Compare policies over loads and seeds, with confidence intervals; every policy sees the same requests."""

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from scheduler.cli.outputs import add_output_arguments, write_outputs
from scheduler.cli.policies import PolicyChoice, parse_policies
from scheduler.cli.progress import ProgressBar
from scheduler.cli.saturation import request_rate
from scheduler.cli.setup import Setup, add_engine_arguments, setup_of
from scheduler.cli.workload import WorkloadChoice, add_workload_arguments, workload_of
from scheduler.errors import ConfigError
from scheduler.reports import Objectives, Summary, comparison_table, summarise
from scheduler.reports import compare as compare_runs

# What a terminal has room for.
COLUMNS = ("requests_per_sec", "ttft_p50_secs", "ttft_p99_secs", "itl_p99_secs", "e2e_mean_secs", "preemptions")


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
    parser.add_argument("--loads", default="0.7,0.9,1.1", help="shares of what these engines can do")
    parser.add_argument("--rates", metavar="R,R", help="requests a second, instead of loads; of a trace, factors")
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
    jobs = list(_jobs(options, setup, workload, policies))
    bar = ProgressBar("comparing", len(jobs))
    summaries = []
    for summary in _run_all(jobs, options.jobs):
        summaries.append(summary)
        bar.update(len(summaries))
    bar.close()
    print(comparison_table(compare_runs(summaries, metrics=columns(setup.objectives))))
    write_outputs(options, f"{options.policies}: {workload.kind}", summaries, setup.objectives)


def columns(objectives: Objectives) -> tuple[str, ...]:
    """The metrics of a table on a terminal; files have them all."""
    has_objectives = objectives.ttft_secs is not None or objectives.itl_secs is not None
    return (*COLUMNS, "attainment" if has_objectives else "jain_timely")


def _jobs(
    options: argparse.Namespace, setup: Setup, workload: WorkloadChoice, policies: Sequence[PolicyChoice]
) -> Iterator[_Job]:
    levels = options.rates or options.loads
    for level in _numbers("--rates" if options.rates else "--loads", levels):
        rate, load = (level, None) if options.rates else (None, level)
        for seed in range(options.seeds):
            # One rate for all seeds of a load: the load is a property of the engines, not of the draw.
            chosen = request_rate(setup, workload, 0, rate, load)
            for policy in policies:
                yield _Job(setup, workload, policy, f"{level:g}", chosen, seed)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text!r}: write numbers with commas between") from None


def _run_all(jobs: Sequence[_Job], num_processes: int) -> Iterator[Summary]:
    if num_processes == 1 or len(jobs) == 1:
        yield from map(_run, jobs)
        return
    with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run, jobs)


def _run(job: _Job) -> Summary:
    result = job.setup.run(job.policy, job.workload.make(job.rate, job.seed), seed=job.seed)
    result.labels |= {"workload": job.workload.kind, "load": job.load, "seed": str(job.seed)}
    return summarise(result, job.setup.objectives)
