"""Simulate one run of one policy, and report everything about it."""

import argparse

from scheduler.cli.outputs import add_output_arguments, check_outputs, write_outputs
from scheduler.cli.policies import parse_policies
from scheduler.cli.progress import ProgressBar
from scheduler.cli.saturation import rates_of
from scheduler.cli.setup import Setup, add_engine_arguments, setup_of
from scheduler.cli.workload import WorkloadChoice, add_workload_arguments, workload_of
from scheduler.errors import ConfigError
from scheduler.reports import run_table, summarise

LOAD = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--policy", default="fcfs", help="a policy, as name or name(option=value,…)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests a second; of a trace, the factor of its own")
    load.add_argument(
        "--load", type=float, metavar="SHARE", help=f"of what these engines can do ({LOAD} if nothing is said)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    add_workload_arguments(parser)
    add_engine_arguments(parser)
    add_output_arguments(parser, single=True)


def run(options: argparse.Namespace) -> None:
    """Simulate and print."""
    setup, workload = setup_of(options), workload_of(options)
    policies = parse_policies(options.policy)
    if len(policies) > 1:
        raise ConfigError("simulate runs one policy; compare runs several")
    policies[0].configured(setup.config)
    check_outputs(options)
    rates = rates_of(
        setup,
        workload,
        options.seed,
        rates=None if options.rate is None else [options.rate],
        loads=None if options.load is None else [options.load],
        default_loads=[LOAD],
    )
    (rate,) = rates.by_level.values()
    print(_heading(setup, workload, rate, rates.capacity), flush=True)
    bar = ProgressBar("simulating", workload.num_requests)
    result = setup.run(
        policies[0],
        workload.make(rate, options.seed),
        seed=options.seed,
        record_steps=bool(options.perfetto),
        on_progress=lambda ended, arrived: bar.update(ended),
    )
    bar.close()
    (level,) = rates.by_level
    result.labels |= {"workload": workload.kind, "load": level, "seed": str(options.seed)}
    summary = summarise(result, setup.objectives)
    print(run_table(summary))
    write_outputs(options, f"{policies[0].text}, {workload.kind}", [summary], setup.objectives, result)


def _heading(setup: Setup, workload: WorkloadChoice, rate: float, capacity: float | None) -> str:
    """What is simulated, in two lines."""
    pace = f" at {rate:.3g} requests/s"
    if capacity is not None:
        pace += f" of the {capacity:.3g} that the engines can do"
    elif workload.path is not None:
        pace = f" of {workload.path} at {rate:g} times its own pace"
    elif workload.has_own_rate:
        pace = ""
    return f"{workload.num_requests} requests ({workload.kind}){pace}\n{setup.describe()}\n"
