"""Percentiles, means, confidence intervals and Jain's index: the arithmetic under every number that a report shows.

Pure functions of plain floats, used by the other files here. One percentile rule serves everywhere: linear
interpolation between order statistics (Hyndman and Fan's type 7, numpy's default, and the rule of `bench/`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

CONFIDENCE = 0.95
# Where distributions are drawn: every percent, and every tenth of one in the tail.
QUANTILE_GRID: tuple[float, ...] = (*(float(percent) for percent in range(99)), *(99 + k / 10 for k in range(11)))


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The value at `percent` (0 to 100) of ascending values, interpolated linearly; None of no values."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean(values: Sequence[float]) -> float | None:
    """The mean, its sum rounded once, so that the order of the values has no effect; None of no values."""
    return math.fsum(values) / len(values) if values else None


def quantile_curve(ordered: Sequence[float]) -> tuple[float, ...]:
    """Ascending values at the percents of `QUANTILE_GRID`: a distribution to draw. Empty for no values."""
    curve = (percentile(ordered, percent) for percent in QUANTILE_GRID)
    return tuple(value for value in curve if value is not None)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some numbers of one kind. Everything but `count` is None when there are none."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of_sorted(cls, ordered: Sequence[float]) -> Self:
        """From ascending values."""
        if not ordered:
            return cls()
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(len(ordered), mean(ordered), p50, p95, p99, ordered[-1])


def jain_index(shares: Sequence[float]) -> float | None:
    """(Σx)² / (n Σx²): 1 when all get the same, 1/n when one gets everything (Jain, Chiu and Hawe, 1984, TR-301).

    Nobody getting anything counts as the same for all; None of no shares.
    """
    if not shares:
        return None
    squares = math.fsum(share * share for share in shares)
    return math.fsum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = `confidence`, T being Student's with `degrees` of freedom.

    Found by bisection of the closed form for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Raises:
        ValueError: `degrees` is below 1, or `confidence` is not strictly between 0 and 1.
    """
    if degrees < 1:
        raise ValueError(f"Student's distribution needs a degree of freedom, not {degrees}")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    low, high = 0.0, 1.0
    while _central_probability(high, degrees) < confidence:
        low, high = high, high * 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if _central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and how far it may be off. `half_width` is None for a single value, which says nothing of its spread."""

    mean: float
    half_width: float | None
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero; never for a single value."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def confidence_interval(values: Iterable[float | None], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval of the mean of independent values, one for each seed; None where there are none.

    Missing values are left out, and `count` says how many remain.
    """
    known = [value for value in values if value is not None]
    middle = mean(known)
    if middle is None:
        return None
    if len(known) == 1:
        return Interval(middle, None, 1)
    variance = math.fsum((value - middle) ** 2 for value in known) / (len(known) - 1)
    half_width = t_quantile(len(known) - 1, confidence) * math.sqrt(variance / len(known))
    return Interval(middle, half_width, len(known))


def paired_difference(
    values: Sequence[float | None], baseline: Sequence[float | None], confidence: float = CONFIDENCE
) -> Interval | None:
    """The interval of `values - baseline`, pair by pair: two policies that met the same arrivals, seed for seed.

    With common random numbers the chance of the workload cancels within a pair, so this is narrower than the two
    intervals suggest. Pairs of which one value is missing are left out. Values that agree to nine digits are equal:
    between them is only the rounding of times, which would otherwise pass for a difference without spread.

    Raises:
        ValueError: the two are not equally long.
    """
    pairs = zip(values, baseline, strict=True)
    known = [_difference(a, b) for a, b in pairs if a is not None and b is not None]
    return confidence_interval(known, confidence)


def _difference(value: float, baseline: float) -> float:
    return 0.0 if math.isclose(value, baseline, rel_tol=1e-9) else value - baseline


def _central_probability(t: float, degrees: int) -> float:
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
