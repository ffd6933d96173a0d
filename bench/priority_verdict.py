"""What the priority probe asks of a server, as criteria over what was measured. Pure; used by `bench/priority.py`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.load import LoadResult
from bench.summary import Distribution, Summary, summarise, time_to_first_text

HIGH, LOW = "HIGH", "LOW"

LEAST_LOW_OVER_HIGH = 10.0
MOST_HIGH_OVER_UNCONTENDED = 5.0
MOST_CONTROL_GAP = 0.05
LEAST_THROUGHPUT_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class LabelledLoad:
    """One run whose requests bear the labels HIGH and LOW. `ramp_secs`: requests of the first seconds do not count."""

    summary: Summary
    high: Distribution | None
    low: Distribution | None

    @classmethod
    def of(cls, result: LoadResult, ramp_secs: float) -> "LabelledLoad":
        """Split a run by label."""
        counted = [record for record in result.records if record.started - result.started >= ramp_secs]
        high, low = (time_to_first_text(record for record in counted if record.label == label) for label in (HIGH, LOW))
        return cls(summarise(result), high, low)

    @property
    def low_over_high(self) -> float:
        """Ratio of the medians of TTFT; NaN if one is unknown."""
        return self.low.p50 / self.high.p50 if self.high and self.low and self.high.p50 > 0 else math.nan


@dataclass(frozen=True, slots=True)
class StatusCheck:
    """One request with a given `priority` field, and the status that it must get."""

    sent: str
    expected: int
    status: int


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that must be true. `value` is NaN where it could not be measured, which fails."""

    name: str
    value: float
    bound: str
    passed: bool


def verdict(
    uncontended: Distribution | None, prioritised: LabelledLoad, control: LabelledLoad, checks: Sequence[StatusCheck]
) -> list[Criterion]:
    """All criteria, in the order in which they are reported."""
    high_over_uncontended = (
        prioritised.high.p50 / uncontended.p50 if prioritised.high and uncontended and uncontended.p50 > 0 else math.nan
    )
    gap = abs(control.low_over_high - 1)
    equal_throughput = control.summary.output_tok_s
    throughput = prioritised.summary.output_tok_s / equal_throughput if equal_throughput else math.nan
    failures = sum(sum(load.summary.failures.values()) for load in (prioritised, control))
    return [
        _at_least("LOW over HIGH, TTFT p50", prioritised.low_over_high, LEAST_LOW_OVER_HIGH),
        _at_most("HIGH over uncontended, TTFT p50", high_over_uncontended, MOST_HIGH_OVER_UNCONTENDED),
        _at_least("output tok/s over the equal-priority run", throughput, LEAST_THROUGHPUT_RATIO),
        _at_most("control: gap between the labels, TTFT p50", gap, MOST_CONTROL_GAP),
        _at_most("failed requests", float(failures), 0),
        *(
            Criterion(
                f"priority {check.sent}: status", check.status, f"= {check.expected}", check.status == check.expected
            )
            for check in checks
        ),
    ]


def failures_by_reason(loads: Mapping[str, LabelledLoad]) -> dict[str, str]:
    """The first failure of each run that has one."""
    return {name: load.summary.first_failure for name, load in loads.items() if load.summary.first_failure}


def _at_least(name: str, value: float, bound: float) -> Criterion:
    return Criterion(name, value, f"≥ {bound:g}", value >= bound)


def _at_most(name: str, value: float, bound: float) -> Criterion:
    return Criterion(name, value, f"≤ {bound:g}", value <= bound)
