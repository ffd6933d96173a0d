"""What tests of the simulator share: workloads that are plain lists, a cost model with round numbers."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scheduler import SchedulerConfig
from scheduler.simulation.records import Arrival, Outcome, RunResult, StepShape
from scheduler.simulation.simulator import Simulator
from scheduler.simulation.topology import Pool, Unified

ROOMY = SchedulerConfig(max_queue_size=10**6, num_pages=8192, max_model_len=8192)


@dataclass(frozen=True)
class LinearCost:
    """Seconds a step and seconds a token."""

    per_step: float = 0.02
    per_token: float = 0.0002
    idle: float = 0.0

    def step_seconds(self, shape: StepShape) -> float:
        return self.per_step + self.per_token * shape.num_tokens

    def idle_start_seconds(self) -> float:
        return self.idle


class Listed:
    """A workload that is a list, and maybe what follows each request's end."""

    def __init__(self, arrivals: Sequence[Arrival], followups: dict[str, Arrival] | None = None):
        self._arrivals = arrivals
        self._followups = followups or {}

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        following = self._followups.get(arrival.request_id)
        return () if following is None else (replace(following, time=now + following.time),)


def poisson(count: int, rate: float, seed: int = 0, **lengths: tuple[int, int]) -> list[Arrival]:
    """Poisson arrivals; `inputs` and `outputs` are ranges of lengths."""
    rng = random.Random(seed)
    inputs, outputs = lengths.get("inputs", (64, 64)), lengths.get("outputs", (64, 64))
    time, arrivals = 0.0, []
    for index in range(count):
        time += rng.expovariate(rate)
        arrivals.append(Arrival(f"r{index}", time, rng.randint(*inputs), rng.randint(*outputs)))
    return arrivals


def simulate(arrivals: Sequence[Arrival], config: SchedulerConfig = ROOMY, **options: object) -> RunResult:
    """One engine."""
    return Simulator(Unified(Pool(LinearCost(), config)), Listed(arrivals), **options).run()  # type: ignore[arg-type]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def by_id(result: RunResult) -> dict[str, Outcome]:
    return {outcome.arrival.request_id: outcome for outcome in result.outcomes}
