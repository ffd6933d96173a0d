"""How long prompts and answers are: distributions of token counts, and how they are written. Used by every workload."""

from collections.abc import Callable, Sequence
from math import exp, isfinite, log
from random import Random

from scheduler.errors import ConfigError

Lengths = Callable[[Random], int]
"""Draws one length, at least 1."""

Z_95 = 1.6448536269514722
FORMS = "64, uniform:16-512, lognormal:MEDIAN,SIGMA[,MOST], p95:MEDIAN,P95[,MOST] or choice:16/32/64"
MOST = 1 << 20
# Beyond this `exp` overflows soon; any median times its exponential is clipped anyway.
MAX_EXPONENT = 700.0


def fixed(length: int) -> Lengths:
    """Always the same."""
    return lambda rng: length


def uniform(least: int, most: int) -> Lengths:
    """Any whole number from `least` to `most`, all alike."""
    return lambda rng: rng.randint(least, most)


def lognormal(median: float, sigma: float, most: int = MOST) -> Lengths:
    """The logarithm is normal with standard deviation `sigma`; clipped to [1, most]."""
    return lambda rng: max(1, round(min(most, median * exp(min(rng.gauss(0.0, sigma), MAX_EXPONENT)))))


def lognormal_by_p95(median: float, p95: float, most: int = MOST) -> Lengths:
    """The same, by its median and its 95th percentile."""
    return lognormal(median, log(p95 / median) / Z_95, most)


def choice(lengths: Sequence[int]) -> Lengths:
    """One of a list, all alike: an empirical distribution."""
    return lambda rng: rng.choice(lengths)


def parse_lengths(name: str, given: object) -> Lengths:
    """From a number or a text such as `uniform:16-512`. Raises ConfigError that names `name` and the known forms."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ConfigError(f"{name} must be one of {FORMS}, not {given!r}")
    kind, colon, rest = str(given).partition(":")
    try:
        if not colon:
            return fixed(_length(kind))
        if kind == "uniform":
            least, most = (_length(part) for part in rest.split("-"))
            if least <= most:
                return uniform(least, most)
        elif kind == "choice":
            return choice([_length(part) for part in rest.split("/")])
        elif kind in ("lognormal", "p95"):
            median, second, *others = (_positive(part) for part in rest.split(","))
            most = _length(str(int(others[0]))) if others else MOST
            if len(others) < 2 and kind == "lognormal":
                return lognormal(median, second, most)
            if len(others) < 2 and second >= median:
                return lognormal_by_p95(median, second, most)
    except ValueError:
        pass
    raise ConfigError(f"{name} {given!r} cannot be read; write {FORMS}")


def _length(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MOST:
        raise ValueError(text)
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not isfinite(number) or number <= 0:
        raise ValueError(text)
    return number
