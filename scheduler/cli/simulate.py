"""Simulate one run of one policy, and report everything about it."""

import argparse

from scheduler.cli.outputs import add_output_arguments, write_outputs
from scheduler.cli.policies import parse_policies
from scheduler.cli.progress import ProgressBar
from scheduler.cli.saturation import request_rate
from scheduler.cli.setup import add_engine_arguments, setup_of
from scheduler.cli.workload import add_workload_arguments, workload_of
from scheduler.errors import ConfigError
from scheduler.reports import run_table, summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--policy", default="fcfs", help="a policy, as name or name(option=value,…)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests a second; of a trace, the factor of its own")
    load.add_argument(
        "--load", type=float, metavar="SHARE", help="of what these engines can do (0.8 if nothing is said)"
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
    load = options.load if options.load is not None or options.rate is not None else 0.8
    rate = request_rate(setup, workload, options.seed, options.rate, load)
    bar = ProgressBar("simulating", workload.num_requests)
    result = setup.run(
        policies[0],
        workload.make(rate, options.seed),
        seed=options.seed,
        record_steps=bool(options.perfetto),
        on_progress=lambda ended, arrived: bar.update(ended),
    )
    bar.close()
    result.labels |= {"workload": workload.kind, "load": f"{rate:.4g}", "seed": str(options.seed)}
    summary = summarise(result, setup.objectives)
    print(run_table(summary))
    write_outputs(options, f"{policies[0].text}, {workload.kind}", [summary], setup.objectives, result)
