"""Which charts a page shows: distributions, metrics against load, requests over time, classes. For `html_report.py`.

Each function returns figures as HTML, without those that would be empty.
"""

from collections.abc import Callable, Iterable, Sequence

from scheduler.reports.comparison import Comparison, Row, as_numbers
from scheduler.reports.metrics import Metric
from scheduler.reports.objectives import CLASSES
from scheduler.reports.statistics import QUANTILE_GRID, confidence_interval, mean
from scheduler.reports.summary import GroupSummary, Summary
from scheduler.reports.svg import Bars, Line, bar_chart, line_chart
from scheduler.reports.timeline import Band, Timeline

MAX_POLICIES = 12
MAX_LOADS = 6
LOGARITHMIC_FROM = 50.0


def distributions(comparison: Comparison) -> str:
    """Shares of requests by TTFT and of tokens by ITL: a pair of figures for each load (of many, six from end to end).

    A line is, percent by percent, the mean over seeds.
    """
    figures = []
    for load in _spread(comparison.loads, MAX_LOADS):
        rows = _shown(comparison, load)
        at = f" at load {load}" if load else ""
        figures.append(_cdf(f"TTFT{at}", "TTFT (s)", "requests (%)", rows, lambda run: run.ttft_curve, 1.0))
        figures.append(_cdf(f"ITL{at}", "ITL (ms)", "gaps between tokens (%)", rows, lambda run: run.itl_curve, 1e3))
    return "".join(figures)


def against_load(comparison: Comparison, metrics: Sequence[Metric[Summary]]) -> str:
    """A figure for each metric: means over seeds and their 95 % intervals. None with fewer than two loads."""
    if len(comparison.loads) < 2:
        return ""
    numbers = as_numbers(comparison.loads)
    places = dict(zip(comparison.loads, numbers or map(float, range(len(comparison.loads))), strict=True))
    figures = []
    for metric in metrics:
        lines = [
            _load_line(policy, metric, [row for row in comparison.rows if row.policy == policy], places)
            for policy in comparison.policies[:MAX_POLICIES]
        ]
        names = () if numbers else comparison.loads
        title = f"{metric.label} against load"
        figures.append(line_chart(title, lines, x_label="load", y_label=metric.heading, x_names=names))
    return "".join(figures)


def by_class(comparison: Comparison) -> str:
    """Bars for each class of priority at the highest load (the last one)."""
    if not comparison.loads:
        return ""
    load = comparison.loads[-1]
    rows = _shown(comparison, load)
    present = [name for name in CLASSES if any(name in run.by_class for row in rows for run in row.runs.values())]
    at = f" at load {load}" if load else ""
    charts: tuple[tuple[str, str, Callable[[GroupSummary], float | None], float], ...] = (
        ("TTFT p95", "ms", lambda group: group.ttft.p95, 1e3),
        ("ITL p95", "ms", lambda group: group.itl.p95, 1e3),
        ("attainment", "%", lambda group: group.attainment, 100.0),
    )
    return "".join(
        bar_chart(
            f"{label} by class of priority{at}",
            present,
            [_class_bars(row, present, take, scale) for row in rows],
            y_label=f"{label} ({unit})",
        )
        for label, unit, take, scale in charts
    )


def over_time(levels: Timeline) -> str:
    """Requests running, waiting and (if there were any) put back: the mean in each bin, within its least and most."""
    lines = [_level_line("running", levels.times, levels.running), _level_line("waiting", levels.times, levels.waiting)]
    if any(levels.preempted.high):
        lines.append(_level_line("preempted", levels.times, levels.preempted))
    return line_chart("Requests over time", lines, x_label="time (s)", y_label="requests")


def _shown(comparison: Comparison, load: str) -> list[Row]:
    rows = (comparison.row(policy, load) for policy in comparison.policies[:MAX_POLICIES])
    return [row for row in rows if row is not None]


def _cdf(
    title: str,
    x_label: str,
    y_label: str,
    rows: Iterable[Row],
    curve: Callable[[Summary], Sequence[float]],
    scale: float,
) -> str:
    lines = []
    for row in rows:
        curves = [found for run in row.runs.values() if (found := curve(run))]
        middles = (mean(values) for values in zip(*curves, strict=True))
        points = zip((value * scale for value in middles if value is not None), QUANTILE_GRID, strict=False)
        lines.append(Line(_name(row.policy), tuple(points)))
    values = sorted(x for line in lines for x, _ in line.points if x > 0)
    logarithmic = bool(values) and values[-1] > LOGARITHMIC_FROM * values[0]
    return line_chart(title, lines, x_label=x_label, y_label=y_label, logarithmic_x=logarithmic)


def _load_line(policy: str, metric: Metric[Summary], rows: Iterable[Row], places: dict[str, float]) -> Line:
    points, band = [], []
    for row in rows:
        interval = confidence_interval([metric.value(run) for run in row.runs.values()])
        if interval is not None:
            x, y, half = places[row.load], interval.mean * metric.scale, (interval.half_width or 0.0) * metric.scale
            points.append((x, y))
            band.append((x, y - half, y + half))
    return Line(_name(policy), tuple(points), tuple(band), marked=True)


def _class_bars(row: Row, names: Sequence[str], take: Callable[[GroupSummary], float | None], scale: float) -> Bars:
    values: list[float | None] = []
    halves: list[float | None] = []
    for name in names:
        groups = [run.by_class[name] for run in row.runs.values() if name in run.by_class]
        interval = confidence_interval([take(group) for group in groups])
        values.append(None if interval is None else interval.mean * scale)
        halves.append(None if interval is None or interval.half_width is None else interval.half_width * scale)
    return Bars(_name(row.policy), tuple(values), tuple(halves))


def _level_line(name: str, times: Sequence[float], band: Band) -> Line:
    points = tuple(zip(times, band.mean, strict=True))
    return Line(name, points, tuple(zip(times, band.low, band.high, strict=True)))


def _name(policy: str) -> str:
    return policy or "this run"


def _spread[Item](items: Sequence[Item], most: int) -> list[Item]:
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
