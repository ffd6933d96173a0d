"""Checks of the numbers that a configuration gives to a policy. Used by the bundled policies; yours may use it too."""

from math import isfinite

from scheduler.errors import ConfigError


def number(name: str, value: object) -> float:
    """A finite number. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def non_negative(name: str, value: object) -> float:
    """A finite number that is not negative. Raises ConfigError."""
    if (checked := number(name, value)) < 0:
        raise ConfigError(f"{name} must not be negative, not {value!r}")
    return checked


def positive(name: str, value: object) -> float:
    """A finite number greater than 0. Raises ConfigError."""
    if (checked := number(name, value)) <= 0:
        raise ConfigError(f"{name} must be greater than 0, not {value!r}")
    return checked


def whole(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least `least`. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def table(name: str, value: object) -> dict[str, object]:
    """A table with text keys. Raises ConfigError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a table, not {value!r}")
    return dict(value)
