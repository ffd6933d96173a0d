"""Workloads as they are chosen on a command line: a kind and its options, or a trace."""

import argparse
from dataclasses import dataclass

from scheduler.cli.policies import parse_value
from scheduler.errors import ConfigError
from scheduler.simulation.records import Workload
from scheduler.workloads import WORKLOADS, TraceWorkload, make_workload, read_trace

NUM_REQUESTS = 500
CLOSED = "closed"


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

    @property
    def has_own_rate(self) -> bool:
        """Whether its requests come as fast as they are answered, so that no rate can be asked for."""
        return self.kind == CLOSED

    def make(self, rate: float, seed: int) -> Workload:
        """The requests of one run. For a trace `rate` is the factor by which it is sped up."""
        if self.path is not None:
            return TraceWorkload(self.path, speedup=rate, limit=self.num_requests)
        return make_workload(self.kind, rate=rate, num_requests=self.num_requests, seed=seed, **self.options)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose a workload."""
    kinds = "; ".join(f"{name}: {summary}" for name, summary in WORKLOADS.items())
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", default="poisson", metavar="KIND", help=kinds)
    group.add_argument("--trace", metavar="FILE", help="a Mooncake JSON-lines trace, or a recording's arrivals.jsonl")
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"requests of a run ({NUM_REQUESTS}; of a trace all)",
    )
    group.add_argument(
        "--workload-option", action="append", default=[], metavar="KEY=VALUE", help="of the kind; may be given again"
    )


def workload_of(options: argparse.Namespace) -> WorkloadChoice:
    """What the options say. Raises ConfigError."""
    if options.requests is not None and options.requests < 1:
        raise ConfigError(f"--requests must be at least 1, not {options.requests}")
    chosen: dict[str, object] = {}
    for text in options.workload_option:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--workload-option {text!r} has no value; write key=value")
        name = key.strip().replace("-", "_")
        if name in chosen:
            raise ConfigError(f"--workload-option {name} is given twice")
        chosen[name] = parse_value(value.strip())
    if options.trace is None:
        choice = WorkloadChoice(options.workload, options.requests or NUM_REQUESTS, chosen)
        choice.make(1.0, 0)  # raises for what is wrong with the options, before anything is simulated
        return choice
    if chosen:
        raise ConfigError("--workload-option does not go with --trace")
    count = sum(1 for _ in read_trace(options.trace))
    if not count:
        raise ConfigError(f"{options.trace}: holds no request")
    return WorkloadChoice("trace", min(count, options.requests or count), {}, options.trace)
