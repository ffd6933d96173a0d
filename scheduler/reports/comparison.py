"""Runs of several policies, loads and seeds, side by side: means over seeds, and differences from the first policy.

Called by tables and pages. Two policies are compared on the seeds that both ran at a load (common random numbers), by
the paired interval. Each star stands for one such test at 95 %; in a table of many, some of twenty are there by chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.reports.metrics import COMPARED, Metric, run_metric
from scheduler.reports.statistics import Interval, confidence_interval, paired_difference
from scheduler.reports.summary import Summary


@dataclass(frozen=True, slots=True)
class Cell:
    """One metric of one row.

    Attributes:
        interval: its mean over seeds; None where no seed has a value.
        difference: this policy minus the first, on common seeds; None in the first policy's own rows.
    """

    interval: Interval | None
    difference: Interval | None

    @property
    def differs(self) -> bool:
        """Whether the difference from the first policy is significant at 95 %."""
        return self.difference is not None and self.difference.excludes_zero


@dataclass(frozen=True, slots=True)
class Row:
    """A policy at a load. `runs` maps a seed to its summary; `cells` follow the comparison's metrics."""

    policy: str
    load: str
    runs: Mapping[str, Summary] = field(repr=False)
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows load by load, policies in order of appearance. Loads ascend if all are numbers."""

    policies: tuple[str, ...]
    loads: tuple[str, ...]
    metrics: tuple[Metric[Summary], ...]
    rows: tuple[Row, ...]

    def row(self, policy: str, load: str) -> Row | None:
        """The row of a policy at a load, if there were runs of it."""
        return next((row for row in self.rows if (row.policy, row.load) == (policy, load)), None)


def compare(
    summaries: Sequence[Summary],
    *,
    metrics: Sequence[str] = COMPARED,
    policy: str = "policy",
    load: str = "load",
    seed: str = "seed",
) -> Comparison:
    """Group runs by three of their labels (those that are missing count as empty).

    Raises:
        ValueError: two runs agree in all three labels, so that something else sets them apart; or an unknown metric.
    """
    chosen = tuple(run_metric(key) for key in metrics)
    grouped: dict[tuple[str, str], dict[str, Summary]] = {}
    for summary in summaries:
        name, level, number = (summary.labels.get(label, "") for label in (policy, load, seed))
        runs = grouped.setdefault((name, level), {})
        if number in runs:
            raise ValueError(f"two runs of {policy} {name!r} at {load} {level!r} have the {seed} {number!r}")
        runs[number] = summary
    policies = tuple(dict.fromkeys(name for name, _ in grouped))
    loads = _in_order(tuple(dict.fromkeys(level for _, level in grouped)))
    rows = []
    for level in loads:
        for name in policies:
            runs = grouped.get((name, level), {})
            if runs:
                baseline = {} if name == policies[0] else grouped.get((policies[0], level), {})
                rows.append(Row(name, level, runs, tuple(_cell(metric, runs, baseline) for metric in chosen)))
    return Comparison(policies, loads, chosen, tuple(rows))


def as_numbers(loads: Sequence[str]) -> list[float] | None:
    """Loads as numbers; None if one of them is not a finite number."""
    try:
        numbers = [float(load) for load in loads]
    except ValueError:
        return None
    return numbers if all(abs(number) < float("inf") for number in numbers) else None


def _in_order(loads: tuple[str, ...]) -> tuple[str, ...]:
    return loads if as_numbers(loads) is None else tuple(sorted(loads, key=float))


def _cell(metric: Metric[Summary], runs: Mapping[str, Summary], baseline: Mapping[str, Summary]) -> Cell:
    common = [seed for seed in runs if seed in baseline]
    return Cell(
        confidence_interval([metric.value(summary) for summary in runs.values()]),
        paired_difference(
            [metric.value(runs[seed]) for seed in common], [metric.value(baseline[seed]) for seed in common]
        ),
    )
