"""Tidy CSV: one line per number of a run, or one line per request. Streams of text, opened by the caller.

Values are in base units (seconds, tokens, ratios) and written so that they read back exactly. What could not be
measured is an empty field. Open the file with `newline=""`, as the csv module asks.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TextIO

from scheduler.reports.metrics import GROUP_METRICS, RUN_METRICS
from scheduler.reports.objectives import Objectives, attains, mean_itl
from scheduler.reports.summary import GroupSummary, Summary
from scheduler.request import priority_class
from scheduler.simulation.records import Outcome, RunResult

METRIC_COLUMNS = ("scope", "group", "metric", "value")
REQUEST_COLUMNS = (
    "request_id",
    "tenant",
    "class",
    "priority",
    "replica",
    "finish_reason",
    "arrival_secs",
    "queued_secs",
    "started_secs",
    "first_token_secs",
    "finished_secs",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "wasted_tokens",
    "transfer_secs",
    "ttft_secs",
    "mean_itl_secs",
    "max_itl_secs",
    "e2e_secs",
    "attained",
)

type Field = str | int | float | None


class _Writer(Protocol):
    def writerow(self, row: Sequence[Field], /) -> object:
        """What `csv.writer` returns has this."""


def write_metrics_csv(stream: TextIO, summaries: Sequence[Summary]) -> None:
    """A line for every metric of every run: its labels, scope (`run`, `class` or `tenant`), group, metric, value.

    Raises:
        ValueError: a label is called like one of the other columns.
    """
    names = _label_names([summary.labels for summary in summaries], METRIC_COLUMNS)
    writer = _writer(stream, (*names, *METRIC_COLUMNS))
    for summary in summaries:
        labels = [summary.labels.get(name, "") for name in names]
        for metric in RUN_METRICS:
            _write(writer, (*labels, "run", "", metric.key, metric.value(summary)))
        _write(writer, (*labels, "run", "", "jain_over", summary.fairness.over))
        for scope, groups in (("class", summary.by_class), ("tenant", summary.by_tenant)):
            for row in _group_rows(scope, groups):
                _write(writer, (*labels, *row))


def write_requests_csv(stream: TextIO, results: Sequence[RunResult], objectives: Objectives | None = None) -> None:
    """A line for every request of every run, in the order of its outcomes. `attained` is 1 or 0.

    Raises:
        ValueError: a label is called like one of the other columns.
    """
    bounds = objectives or Objectives()
    names = _label_names([result.labels for result in results], REQUEST_COLUMNS)
    writer = _writer(stream, (*names, *REQUEST_COLUMNS))
    for result in results:
        labels = [result.labels.get(name, "") for name in names]
        for outcome in result.outcomes:
            _write(writer, (*labels, *_request_row(outcome, bounds)))


def _group_rows(scope: str, groups: Mapping[str, GroupSummary]) -> Iterator[tuple[Field, ...]]:
    for name, group in groups.items():
        for metric in GROUP_METRICS:
            yield scope, name, metric.key, metric.value(group)


def _request_row(outcome: Outcome, objectives: Objectives) -> tuple[Field, ...]:
    arrival = outcome.arrival
    name = priority_class(arrival.priority)
    return (
        arrival.request_id,
        arrival.tenant,
        name,
        arrival.priority,
        outcome.replica,
        outcome.finish_reason,
        arrival.time,
        outcome.queued_at,
        outcome.started_at,
        outcome.first_token_at,
        outcome.finished_at,
        arrival.input_length,
        len(outcome.token_times),
        outcome.num_cached_tokens,
        outcome.num_preemptions,
        outcome.num_wasted_tokens,
        outcome.transfer_seconds,
        outcome.ttft,
        mean_itl(outcome),
        max(outcome.itls(), default=None),
        outcome.latency,
        int(attains(outcome, objectives.of(name))),
    )


def _label_names(labels: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name for mapping in labels for name in mapping))
    taken = [name for name in names if name in columns]
    if taken:
        raise ValueError(f"labels called like a column: {', '.join(taken)}")
    return names


def _writer(stream: TextIO, columns: Sequence[str]) -> _Writer:
    writer = csv.writer(stream, lineterminator="\n")
    _write(writer, columns)
    return writer


def _write(writer: _Writer, fields: Sequence[Field]) -> None:
    """Half a surrogate pair, which JSON can bring in and no encoding can write, becomes a question mark."""
    writer.writerow([f.encode("utf-8", "replace").decode() if isinstance(f, str) else f for f in fields])
