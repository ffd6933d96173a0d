"""Open loops: requests come whatever the server does. `poisson`, and `gamma` for bursts."""

from collections.abc import Iterator
from random import Random

from scheduler.errors import ConfigError
from scheduler.policies.options import positive, whole
from scheduler.simulation.records import Arrival
from scheduler.workloads.requests import RequestShape, RequestSource

# Beyond these the gaps are no longer numbers that can be drawn well.
CV_RANGE = (0.01, 100.0)


class OpenLoop:
    """Gaps between arrivals are Gamma distributed with mean 1/rate and coefficient of variation `cv`; 1 is Poisson.

    Measured traces of LLM servers have a cv well above 1 (Wang et al., BurstGPT, 2024).
    """

    def __init__(self, shape: RequestShape, rate: float, num_requests: int, seed: int, cv: float = 1.0):
        self._source = RequestSource(shape, seed)
        self._rate = positive("rate", rate)
        self._num_requests = whole("num_requests", num_requests)
        if not CV_RANGE[0] <= positive("cv", cv) <= CV_RANGE[1]:
            raise ConfigError(f"cv must be between {CV_RANGE[0]:g} and {CV_RANGE[1]:g}, not {cv}")
        self._shape_parameter = 1.0 / cv**2
        self._gaps = Random(f"{seed}/gaps")

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
