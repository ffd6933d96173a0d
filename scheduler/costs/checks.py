"""Numbers that a cost model accepts, checked in one place. Used by the models' constructors and by the readers."""

import math

from scheduler.errors import ConfigError


def at_least_zero(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is a finite number of 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value}; it must be a finite number of 0 or more")


def above_zero(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is a finite number greater than 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; it must be a finite number greater than 0")


def share(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is greater than 0 and at most 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name} is {value}; it must be greater than 0 and at most 1")
