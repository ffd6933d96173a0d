"""From values to places in a drawing, and the round numbers to write beside an axis. Used by `svg.py`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

MAX_TICKS = 7


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis: values from `low` to `high` lie at places from `start` to `end`, by their logarithms if asked for."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    @classmethod
    def over(
        cls, values: Iterable[float], start: float, end: float, *, from_zero: bool = False, logarithmic: bool = False
    ) -> Self:
        """An axis that holds all the (finite) values. A logarithmic one starts at the least that is above zero."""
        known = [value for value in values if math.isfinite(value)]
        positive = [value for value in known if value > 0]
        if logarithmic and positive:
            low, high = min(positive), max(positive)
            return cls(low, high if high > low else low * 10, start, end, True)
        low, high = min(known, default=0.0), max(known, default=1.0)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        return cls(low, high if high > low else low + 1, start, end)

    def place(self, value: float) -> float:
        """Where a value lies; outside values at the nearest end."""
        inside = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> tuple[float, ...]:
        """Round values within the axis, ascending."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1,)):
                inside = tuple(
                    tick
                    for power in decades
                    for digit in digits
                    if self.low <= (tick := digit * 10.0**power) <= self.high
                )
                if 2 <= len(inside) <= MAX_TICKS + 2:
                    return inside
            if len(inside) > MAX_TICKS:
                return inside[:: math.ceil(len(inside) / MAX_TICKS)]
        step = _round_step((self.high - self.low) / (MAX_TICKS - 1))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return tuple(index * step for index in range(first, last + 1))


def tick_text(value: float) -> str:
    """As short as six digits allow, without a negative zero."""
    return f"{value + 0.0:.6g}"


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10, 20) if digit * power >= least * (1 - 1e-9))
