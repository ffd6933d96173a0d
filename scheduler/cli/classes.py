"""The time to the first token by class of priority, beside a comparison's table, which mixes the classes."""

from collections.abc import Sequence

from scheduler.reports import Summary
from scheduler.reports.comparison import Comparison
from scheduler.reports.grid import Grid, as_text, with_interval
from scheduler.reports.objectives import CLASSES
from scheduler.reports.statistics import confidence_interval


def class_table(comparison: Comparison) -> str | None:
    """Median and 99th percentile for each load and policy; None if all requests are of one class."""
    summaries = [summary for row in comparison.rows for summary in row.runs.values()]
    classes = [name for name in reversed(CLASSES) if any(name in summary.by_class for summary in summaries)]
    if len(classes) < 2:
        return None
    rows = []
    for row in comparison.rows:
        runs = list(row.runs.values())
        cells = (_cell(runs, name, statistic) for statistic in ("p50", "p99") for name in classes)
        rows.append((row.load or "-", row.policy, *cells))
    headings = (f"{name} {statistic}" for statistic in ("p50", "p99") for name in classes)
    return as_text(Grid("TTFT by class of priority (ms)", ("load", "policy", *headings), tuple(rows), 2))


def _cell(runs: Sequence[Summary], name: str, statistic: str) -> str:
    groups = [run.by_class[name] for run in runs if name in run.by_class]
    return with_interval(confidence_interval([getattr(group.ttft, statistic) for group in groups]), 1e3)
