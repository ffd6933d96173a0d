"""Shares that are written as text, such as `1.0:0.5,0.0:0.5`, and the draw of one of them. Used by every workload."""

from bisect import bisect_right
from itertools import accumulate
from math import isfinite
from random import Random

from scheduler.errors import ConfigError


class Shares:
    """Names with weights; `draw` gives each as often as its weight says. Immutable."""

    def __init__(self, weights: dict[str, float]):
        self.names = tuple(weights)
        self._bounds = list(accumulate(weights.values()))

    def draw(self, rng: Random) -> str:
        """One name; always takes exactly one number from `rng`."""
        point = rng.random() * self._bounds[-1]
        return self.names[min(bisect_right(self._bounds, point), len(self.names) - 1)]


def parse_shares(name: str, given: object) -> Shares:
    """From `a:0.2,b:0.8`, or `a,b` for equal shares, or one name. Raises ConfigError."""
    weights: dict[str, float] = {}
    for part in str(given).split(","):
        label, colon, text = part.strip().rpartition(":")
        if not colon:
            label, text = part.strip(), "1"
        label = label.strip()
        try:
            weight = float(text)
        except ValueError:
            weight = -1.0
        if not label or not isfinite(weight) or weight <= 0 or label in weights:
            raise ConfigError(
                f"{name} {given!r} cannot be read; write name:share with commas between, such as a:0.2,b:0.8"
            )
        weights[label] = weight
    return Shares(weights)


def parse_priorities(name: str, given: object) -> Shares:
    """The same, of priorities in [0, 1]."""
    shares = parse_shares(name, given)
    for label in shares.names:
        try:
            is_priority = 0 <= float(label) <= 1
        except ValueError:
            is_priority = False
        if not is_priority:
            raise ConfigError(f"{name} {given!r}: {label!r} is not a priority in [0, 1]")
    return shares
