"""The names, units and directions of the numbers in a `Summary`: one list for tables, CSV files and pages."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from scheduler.reports.statistics import Distribution
from scheduler.reports.summary import GroupSummary, Summary

STATISTICS = ("mean", "p50", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Metric[Source]:
    """One number of a summary.

    Attributes:
        key: its name in CSV files, with the base unit at its end. label: its name for people.
        unit: what it is shown in; "" for plain counts and ratios. scale: from the base unit to that. digits: shown.
        value: takes it out of the summary; None where it could not be measured.
    """

    key: str
    label: str
    unit: str
    scale: float
    digits: int
    value: Callable[[Source], float | None]

    @property
    def heading(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _times[Source](key: str, label: str, take: Callable[[Source], Distribution]) -> tuple[Metric[Source], ...]:
    return tuple(_time(key, label, statistic, take) for statistic in STATISTICS)


def _time[Source](key: str, label: str, statistic: str, take: Callable[[Source], Distribution]) -> Metric[Source]:
    inner: Callable[[Distribution], float | None] = attrgetter(statistic)
    return Metric(f"{key}_{statistic}_secs", f"{label} {statistic}", "ms", 1e3, 1, lambda source: inner(take(source)))


def _ttft(group: GroupSummary) -> Distribution:
    return group.ttft


def _itl(group: GroupSummary) -> Distribution:
    return group.itl


def _e2e(group: GroupSummary) -> Distribution:
    return group.e2e


def _queue(summary: Summary) -> Distribution:
    return summary.queue


GROUP_METRICS: tuple[Metric[GroupSummary], ...] = (
    Metric("requests", "requests", "", 1, 0, lambda group: group.counts.total),
    Metric("finished", "finished", "", 1, 0, lambda group: group.counts.finished),
    Metric("refused", "refused", "", 1, 0, lambda group: group.counts.refused),
    Metric("aborted", "aborted", "", 1, 0, lambda group: group.counts.aborted),
    Metric("errors", "errors", "", 1, 0, lambda group: group.counts.errors),
    Metric("unfinished", "unfinished", "", 1, 0, lambda group: group.counts.unfinished),
    Metric("attainment", "attainment", "%", 100, 1, lambda group: group.attainment),
    Metric("goodput_requests_per_sec", "goodput", "req/s", 1, 2, lambda group: group.goodput),
    *_times("ttft", "TTFT", _ttft),
    *_times("itl", "ITL", _itl),
    *_times("e2e", "end-to-end", _e2e),
)


def _overall(metric: Metric[GroupSummary]) -> Metric[Summary]:
    inner = metric.value
    return Metric(
        metric.key, metric.label, metric.unit, metric.scale, metric.digits, lambda summary: inner(summary.overall)
    )


RUN_METRICS: tuple[Metric[Summary], ...] = (
    *map(_overall, GROUP_METRICS),
    Metric("duration_secs", "duration", "s", 1, 2, lambda summary: summary.duration_secs),
    Metric("span_secs", "span", "s", 1, 2, lambda summary: summary.span_secs),
    Metric("requests_per_sec", "throughput", "req/s", 1, 2, lambda summary: summary.requests_per_sec),
    Metric("output_tok_s", "output", "tok/s", 1, 1, lambda summary: summary.output_tok_s),
    *_times("queue", "queue", _queue),
    Metric("preemptions", "preemptions", "", 1, 1, lambda summary: summary.preemptions),
    Metric("wasted_tokens", "wasted tokens", "", 1, 0, lambda summary: summary.wasted_tokens),
    Metric("wasted_share", "wasted", "% of computed", 100, 2, lambda summary: summary.wasted_share),
    Metric("prefix_hit_rate", "prefix hits", "%", 100, 1, lambda summary: summary.prefix_hit_rate),
    Metric("transfers", "transfers", "", 1, 0, lambda summary: summary.transfers),
    Metric("transfer_secs", "transfer", "s", 1, 3, lambda summary: summary.transfer_secs),
    Metric("steps", "steps", "", 1, 0, lambda summary: summary.num_steps),
    Metric("jain_parties", "parties compared", "", 1, 0, lambda summary: summary.fairness.count),
    Metric("jain_served", "Jain, served", "", 1, 3, lambda summary: summary.fairness.served),
    Metric("jain_timely", "Jain, timely", "", 1, 3, lambda summary: summary.fairness.timely),
)

COMPARED = (
    "requests_per_sec",
    "output_tok_s",
    "goodput_requests_per_sec",
    "attainment",
    "ttft_p50_secs",
    "ttft_p99_secs",
    "itl_p50_secs",
    "itl_p99_secs",
    "e2e_mean_secs",
    "preemptions",
    "prefix_hit_rate",
    "jain_timely",
)


def run_metric(key: str) -> Metric[Summary]:
    """The metric of a run with this key.

    Raises:
        ValueError: there is none.
    """
    for metric in RUN_METRICS:
        if metric.key == key:
            return metric
    raise ValueError(f"unknown metric {key!r}; known are {', '.join(metric.key for metric in RUN_METRICS)}")
