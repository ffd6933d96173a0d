"""Plain-text tables for a terminal: one run, or policies and loads side by side.

Each table is made as a `Grid` first, which `html_report.py` shows as well.
"""

from collections.abc import Mapping

from scheduler.reports.comparison import Comparison
from scheduler.reports.grid import Grid, as_text, fixed, with_interval
from scheduler.reports.metrics import GROUP_METRICS, STATISTICS
from scheduler.reports.summary import GroupSummary, Summary

GROUP_COLUMNS = (
    "requests",
    "finished",
    "refused",
    "ttft_p50_secs",
    "ttft_p95_secs",
    "ttft_p99_secs",
    "itl_p50_secs",
    "itl_p95_secs",
    "itl_p99_secs",
    "attainment",
    "goodput_requests_per_sec",
)
MAX_TENANTS = 50


def run_table(summary: Summary) -> str:
    """Everything about one run, as several tables."""
    return "\n".join(as_text(grid) for grid in run_grids(summary))


def comparison_table(comparison: Comparison) -> str:
    """A row for each load and policy; a star marks what differs significantly from the first policy."""
    return as_text(comparison_grid(comparison))


def run_grids(summary: Summary) -> tuple[Grid, ...]:
    """The tables of one run: counts and rates, times, and groups. Of many tenants, the ones with most requests."""
    grids = [_rates(summary), _efficiency(summary), _times(summary)]
    if summary.by_class:
        grids.append(_groups("classes of priority", "class", summary.by_class))
    if len(summary.by_tenant) > 1:
        grids.append(_tenants(summary.by_tenant))
    return tuple(grids)


def comparison_grid(comparison: Comparison) -> Grid:
    """The cells of `comparison_table`."""
    rows = []
    for row in comparison.rows:
        cells = (
            with_interval(cell.interval, metric.scale, metric.digits, cell.differs)
            for metric, cell in zip(comparison.metrics, row.cells, strict=True)
        )
        rows.append((row.load or "-", row.policy or "-", str(len(row.runs)), *cells))
    notes = ["± is the 95 % confidence interval of the mean over seeds."]
    if len(comparison.policies) > 1:
        first = comparison.policies[0] or "-"
        notes.append(f"* differs from {first} at the same load: the 95 % interval of the paired difference excludes 0.")
    headings = ("load", "policy", "seeds", *(metric.heading for metric in comparison.metrics))
    return Grid("policies and loads", headings, tuple(rows), 2, tuple(notes))


def label_text(labels: Mapping[str, str]) -> str:
    """What a run was, on one line."""
    return ", ".join(f"{name} {value}" for name, value in labels.items()) or "one run"


def _rates(summary: Summary) -> Grid:
    counts, overall = summary.overall.counts, summary.overall
    cells = (
        *map(str, (counts.total, counts.finished, counts.refused, counts.aborted, counts.errors, counts.unfinished)),
        fixed(summary.span_secs, digits=2),
        fixed(summary.requests_per_sec, digits=2),
        fixed(summary.output_tok_s),
        fixed(overall.attainment, 100),
        fixed(overall.goodput, digits=2),
    )
    headings = ("requests", "finished", "refused", "aborted", "errors", "unfinished", "span (s)")
    rates = ("throughput (req/s)", "output (tok/s)", "attainment (%)", "goodput (req/s)")
    return Grid(label_text(summary.labels), headings + rates, (cells,), 0)


def _efficiency(summary: Summary) -> Grid:
    cells = (
        str(summary.num_steps),
        str(summary.preemptions),
        str(summary.wasted_tokens),
        fixed(summary.wasted_share, 100, 2),
        fixed(summary.prefix_hit_rate, 100),
        str(summary.transfers),
        fixed(summary.transfer_secs, digits=3),
        fixed(summary.fairness.served, digits=3),
        fixed(summary.fairness.timely, digits=3),
    )
    headings = ("steps", "preemptions", "wasted (tokens)", "wasted (% of computed)", "prefix hits (%)")
    others = ("transfers", "transfer (s)", "Jain, served", "Jain, timely")
    note = f"Jain's index is over {summary.fairness.count} {summary.fairness.over}."
    return Grid("efficiency and fairness", headings + others, (cells,), 0, (note,))


def _times(summary: Summary) -> Grid:
    overall = summary.overall
    kinds = {"TTFT": overall.ttft, "ITL": overall.itl, "end-to-end": overall.e2e, "queue": summary.queue}
    rows = tuple(
        (name, str(times.count), *(fixed(getattr(times, statistic), 1e3) for statistic in STATISTICS))
        for name, times in kinds.items()
    )
    return Grid("times", ("time", "count", *(f"{statistic} (ms)" for statistic in STATISTICS)), rows)


def _tenants(groups: Mapping[str, GroupSummary]) -> Grid:
    busiest = frozenset(sorted(groups, key=lambda name: (-groups[name].counts.total, name))[:MAX_TENANTS])
    shown = {name: group for name, group in groups.items() if name in busiest}
    left = len(groups) - len(shown)
    notes = (f"{left} tenants with fewer requests are left out.",) if left else ()
    return _groups("tenants", "tenant", shown, notes)


def _groups(title: str, kind: str, groups: Mapping[str, GroupSummary], notes: tuple[str, ...] = ()) -> Grid:
    metrics = [metric for key in GROUP_COLUMNS for metric in GROUP_METRICS if metric.key == key]
    rows = tuple(
        (name, *(fixed(metric.value(group), metric.scale, metric.digits) for metric in metrics))
        for name, group in groups.items()
    )
    return Grid(title, (kind, *(metric.heading for metric in metrics)), rows, 1, notes)
