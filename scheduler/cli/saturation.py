"""From loads, shares of what the engines can do, to requests a second. Used by `simulate` and `compare`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from scheduler.cli.policies import PolicyChoice
from scheduler.cli.setup import Setup
from scheduler.cli.workload import WorkloadChoice
from scheduler.errors import ConfigError

NUM_REQUESTS = 400
FLOOD = 1e6


@dataclass(frozen=True)
class Rates:
    """How fast requests come.

    Attributes:
        by_level: requests a second by what the user calls it, a load or a rate; of a trace, the factor of its own pace;
            of a closed loop, which has no rate, one entry without a name.
        capacity: requests a second that the engines can do, None if nothing asked for it.
    """

    by_level: dict[str, float]
    capacity: float | None = None


def rates_of(
    setup: Setup,
    workload: WorkloadChoice,
    seed: int,
    *,
    rates: Sequence[float] | None,
    loads: Sequence[float] | None,
    default_loads: Sequence[float],
) -> Rates:
    """The rates themselves if given, else `loads`, else the default. Simulates once if it needs the capacity.

    Raises:
        ConfigError: for what is not positive or comes twice, or does not go with the workload.
    """
    if workload.has_own_rate:
        if rates or loads:
            raise ConfigError("a closed loop has no rate or load; choose --workload-option num_clients=N instead")
        return Rates({"": 1.0})
    if workload.path is not None and loads:
        raise ConfigError("a trace has no load; its rate is the factor of its own pace, 1 by default")
    if workload.path is not None and not rates:
        return Rates({"1": 1.0})
    if rates:
        return Rates(_by_level("rate", rates))
    levels = _by_level("load", loads or default_loads)
    most = capacity(setup, workload, seed)
    return Rates({name: load * most for name, load in levels.items()}, most)


def _by_level(name: str, values: Sequence[float]) -> dict[str, float]:
    levels: dict[str, float] = {}
    for value in values:
        if not isfinite(value) or value <= 0:
            raise ConfigError(f"a {name} must be greater than 0, not {value:g}")
        if (level := f"{value:g}") in levels:
            raise ConfigError(f"the {name} {level} is named twice")
        levels[level] = value
    return levels


def capacity(setup: Setup, workload: WorkloadChoice, seed: int) -> float:
    """Requests a second that the engines finish under `fcfs` when everybody comes at once.

    Between the first and the last tenth of the requests, so that filling and emptying the slots do not count.
    """
    flood = replace(workload, num_requests=min(workload.num_requests, NUM_REQUESTS))
    result = setup.run(PolicyChoice("fcfs", "fcfs", {}), flood.make(FLOOD, seed), seed=seed)
    ends = sorted(outcome.finished_at for outcome in result.outcomes if outcome.finished_at is not None)
    if len(ends) < 2:
        raise ConfigError("the load cannot be found out: not two requests of this workload fit; name a rate instead")
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    span = ends[last] - ends[first]
    return (last - first) / span if span > 0 else len(ends) / ends[-1]
