"""From the records of a load to the numbers that are reported. Pure functions; used by the reports and by tests."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from bench.load import LoadResult, RequestRecord


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted values lie, interpolated linearly (numpy's default rule)."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some durations in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """None when there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """One load, in numbers.

    Attributes:
        requests: answered in full. failures: count of each reason. first_failure: what the server said, or None.
        wall_secs: from the first request to the last answer. client_cpu_ratio: cores that this process used.
        prompt_tokens, cached_tokens, output_tokens: sums, as the server counted them.
        output_tok_s, total_tok_s: over `wall_secs`; total counts prompts too.
        ttft: request written → first event with text. itl: gaps between such events of one request.
        tpot: (last text - first text) / (output tokens - 1), one value a request. e2e: request written → answer ended.
        short_answers: fewer tokens than were asked for. mean_prompt_tokens: None if the server does not count.
    """

    requests: int
    failures: Mapping[str, int]
    first_failure: str | None
    wall_secs: float
    client_cpu_ratio: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tok_s: float
    total_tok_s: float
    requests_per_sec: float
    mean_prompt_tokens: float | None
    short_answers: int
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None


def summarise(result: LoadResult) -> Summary:
    """The numbers of one load."""
    records, wall = result.records, result.wall_secs
    prompts = [record.tokens.prompt for record in records if record.tokens.prompt is not None]
    output = sum(record.output_tokens for record in records)
    failure = result.failures[0] if result.failures else None
    return Summary(
        requests=len(records),
        failures=dict(Counter(failure.reason for failure in result.failures)),
        first_failure=None if failure is None else f"{failure.reason}: {failure.message}".removesuffix(": "),
        wall_secs=wall,
        client_cpu_ratio=result.cpu_secs / wall,
        prompt_tokens=sum(prompts),
        cached_tokens=sum(record.tokens.cached or 0 for record in records),
        output_tokens=output,
        output_tok_s=output / wall,
        total_tok_s=(output + sum(prompts)) / wall,
        requests_per_sec=len(records) / wall,
        mean_prompt_tokens=sum(prompts) / len(prompts) if prompts else None,
        short_answers=sum(record.output_tokens < record.max_tokens for record in records),
        ttft=time_to_first_text(records),
        itl=Distribution.of(b - a for record in records for a, b in pairwise(record.text_times)),
        tpot=Distribution.of(_time_per_token(record) for record in records if _has_gaps(record)),
        e2e=Distribution.of(record.ended - record.started for record in records),
    )


def time_to_first_text(records: Iterable[RequestRecord]) -> Distribution | None:
    """Of the records that have text; None when none has."""
    return Distribution.of(record.ttft for record in records if record.text_times)


@dataclass(frozen=True, slots=True)
class Spread:
    """The same quantity in several rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None when there are no values."""
        return cls(min(values), statistics.median(values), max(values)) if values else None


def _has_gaps(record: RequestRecord) -> bool:
    return len(record.text_times) > 1 and record.output_tokens > 1


def _time_per_token(record: RequestRecord) -> float:
    return (record.text_times[-1] - record.text_times[0]) / (record.output_tokens - 1)
