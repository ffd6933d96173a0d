"""The simplest cost of a step: a fixed time, and so much a token. For tests, and for studies of policies alone."""

from dataclasses import dataclass

from scheduler.costs.checks import at_least_zero
from scheduler.errors import ConfigError
from scheduler.simulation.records import StepShape


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """Seconds of every step plus seconds of each token in it. A `CostModel`.

    Raises ConfigError if a number is negative, or if both of a step's are 0.

    Attributes:
        seconds_per_step, seconds_per_token: at least one of them greater than 0.
        idle_seconds: what a step takes longer after the device was idle.
    """

    seconds_per_step: float
    seconds_per_token: float = 0.0
    idle_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "seconds_per_token", "idle_seconds"):
            at_least_zero(name, getattr(self, name))
        if not self.seconds_per_step and not self.seconds_per_token:
            raise ConfigError("a step must take time: seconds_per_step and seconds_per_token are both 0")

    def step_seconds(self, shape: StepShape) -> float:
        """Seconds of a step of `shape.num_tokens` tokens."""
        return self.seconds_per_step + self.seconds_per_token * shape.num_tokens

    def idle_start_seconds(self) -> float:
        """What a step takes longer after the device was idle."""
        return self.idle_seconds
