"""Workloads as they are chosen on a command line: a kind and its options, or a trace."""

import argparse
from dataclasses import dataclass

from scheduler.cli.policies import parse_value
from scheduler.errors import ConfigError
from scheduler.simulation.records import Workload
from scheduler.workloads import WORKLOADS, TraceWorkload, make_workload


@dataclass(frozen=True)
class WorkloadChoice:
    """A workload without rate and seed. Picklable; `make` gives a fresh one for each run.

    Attributes:
        kind: a name of `WORKLOADS`, or `trace`. num_requests: how many. options: of the kind. path: of the trace.
    """

    kind: str
    num_requests: int
    options: dict[str, object]
    path: str | None = None

    def make(self, rate: float, seed: int) -> Workload:
        """The requests of one run. For a trace `rate` is the factor by which it is sped up."""
        if self.path is not None:
            return TraceWorkload(self.path, speedup=rate, limit=self.num_requests)
        return make_workload(self.kind, rate=rate, num_requests=self.num_requests, seed=seed, **self.options)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose a workload."""
    kinds = "; ".join(f"{name}: {summary}" for name, summary in WORKLOADS.items())
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=tuple(WORKLOADS), default="poisson", help=kinds)
    group.add_argument("--trace", metavar="FILE", help="a Mooncake JSON-lines trace, or a recording's arrivals.jsonl")
    group.add_argument("--requests", type=int, default=500, metavar="N", help="requests of a run")
    group.add_argument(
        "--workload-option", action="append", default=[], metavar="KEY=VALUE", help="of the kind; may be given again"
    )


def workload_of(options: argparse.Namespace) -> WorkloadChoice:
    """What the options say. Raises ConfigError."""
    if options.requests < 1:
        raise ConfigError(f"--requests must be at least 1, not {options.requests}")
    chosen: dict[str, object] = {}
    for text in options.workload_option:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--workload-option {text!r} has no value; write key=value")
        chosen[key.replace("-", "_")] = parse_value(value)
    if options.trace is not None:
        if chosen:
            raise ConfigError("--workload-option does not go with --trace")
        return WorkloadChoice("trace", options.requests, {}, options.trace)
    return WorkloadChoice(options.workload, options.requests, chosen)
