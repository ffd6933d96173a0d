"""From a load, a share of what the engines can do, to requests a second. Used by `simulate` and `compare`."""

from dataclasses import replace

from scheduler.cli.policies import PolicyChoice
from scheduler.cli.setup import Setup
from scheduler.cli.workload import WorkloadChoice
from scheduler.errors import ConfigError

NUM_REQUESTS = 400
FLOOD = 1e6


def request_rate(setup: Setup, workload: WorkloadChoice, seed: int, rate: float | None, load: float | None) -> float:
    """The rate itself if given, else `load` of the engines' capacity. Raises ConfigError for what is not positive."""
    for name, value in (("--rate", rate), ("--load", load)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be greater than 0, not {value:g}")
    if rate is not None:
        return rate
    if workload.path is not None:
        return 1.0 if load is None else load
    return (1.0 if load is None else load) * capacity(setup, workload, seed)


def capacity(setup: Setup, workload: WorkloadChoice, seed: int) -> float:
    """Requests a second that the engines finish under `fcfs` when everybody comes at once.

    Between the first and the last tenth of the requests, so that filling and emptying the slots do not count. A
    workload that holds its own number in check (a closed loop) is simply run.
    """
    flood = replace(workload, num_requests=min(workload.num_requests, NUM_REQUESTS))
    result = setup.run(PolicyChoice("fcfs", "fcfs", {}), flood.make(FLOOD, seed), seed=seed)
    ends = sorted(outcome.finished_at for outcome in result.outcomes if outcome.finished_at is not None)
    if len(ends) < 2:
        raise ConfigError("no request of this workload fits these engines")
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    span = ends[last] - ends[first]
    return (last - first) / span if span > 0 else len(ends) / ends[-1]
