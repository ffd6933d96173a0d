"""Open loops: requests come whatever the server does. `poisson`, and `gamma` for bursts."""

import random
from collections.abc import Iterator

from scheduler.policies.options import positive, whole
from scheduler.simulation.records import Arrival
from scheduler.workloads.requests import RequestShape, RequestSource


class OpenLoop:
    """Gaps between arrivals are Gamma distributed with mean 1/rate and coefficient of variation `cv`; 1 is Poisson.

    Measured traces of LLM servers have a cv well above 1 (Wang et al., BurstGPT, 2024).
    """

    def __init__(self, shape: RequestShape, rate: float, num_requests: int, seed: int, cv: float = 1.0):
        self._source = RequestSource(shape, seed)
        self._rate = positive("rate", rate)
        self._num_requests = whole("num_requests", num_requests)
        self._shape_parameter = 1.0 / positive("cv", cv) ** 2
        self._gaps = random.Random(f"{seed}/gaps")

    def arrivals(self) -> Iterator[Arrival]:
        """All requests, in order."""
        time = 0.0
        for _ in range(self._num_requests):
            # Drawn with mean 1 and divided then, so that another rate only stretches the time.
            time += self._gaps.gammavariate(self._shape_parameter, 1.0 / self._shape_parameter) / self._rate
            yield self._source.next(time)

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        """Nothing follows."""
        return ()
