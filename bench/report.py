"""Tables and JSON for `bench/serve.py`. Times are milliseconds in tables and seconds in JSON."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.comparison import LevelResult, Ratios, ratios
from bench.summary import Spread, Summary

Share = Callable[[str, Summary], float | None]


def print_level(console: Console, result: LevelResult, share: Share) -> None:
    """Tables of throughput, of latencies and, for several servers, of ratios. Figures are medians of the rounds."""
    console.print(_throughput_table(result, share))
    console.print(_latency_table(result))
    _print_warnings(console, result)
    if len(result.rounds) > 1:
        console.print(_ratio_table(ratios(result)))


def level_as_json(result: LevelResult, share: Share) -> dict[str, Any]:
    """Everything that was measured at a level."""
    return {
        result.level.kind: result.level.value,
        "servers": {
            name: [asdict(summary) | {"roofline_share": share(name, summary)} for summary in rounds]
            for name, rounds in result.rounds.items()
        },
        "ratios": [asdict(ratio) for ratio in ratios(result)],
    }


def _throughput_table(result: LevelResult, share: Share) -> Table:
    headings = ("answered", "failed", "output tok/s", "total tok/s", "% of roofline", "client, % of a core")
    table = _table(f"{result.level}", ("server",), headings)
    for name, rounds in result.rounds.items():
        table.add_row(
            name,
            str(sum(summary.requests for summary in rounds)),
            str(sum(sum(summary.failures.values()) for summary in rounds)),
            _median([summary.output_tok_s for summary in rounds]),
            _median([summary.total_tok_s for summary in rounds]),
            _median([share(name, summary) for summary in rounds], scale=100, digits=0),
            _median([summary.client_cpu_ratio for summary in rounds], scale=100),
        )
    return table


def _latency_table(result: LevelResult) -> Table:
    table = _table("milliseconds", ("server", "time"), ("mean", "p50", "p90", "p99"))
    for name, rounds in result.rounds.items():
        times = {
            "TTFT": [summary.ttft for summary in rounds],
            "ITL": [summary.itl for summary in rounds],
            "TPOT": [summary.tpot for summary in rounds],
        }
        for time, values in times.items():
            known = [value for value in values if value is not None]
            columns = zip(*((value.mean, value.p50, value.p90, value.p99) for value in known), strict=True)
            table.add_row(name, time, *(_median(column, scale=1e3) for column in columns))
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _median(values: Sequence[float | None], scale: float = 1.0, digits: int = 1) -> str:
    known = [value * scale for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else "-"


def _print_warnings(console: Console, result: LevelResult) -> None:
    for name, rounds in result.rounds.items():
        failure = next((summary.first_failure for summary in rounds if summary.first_failure), None)
        if failure:
            console.print(f"{name}: first failure: {failure}", markup=False, style="red")
        short = sum(summary.short_answers for summary in rounds)
        if short:
            console.print(f"{name}: {short} answers were shorter than asked for", markup=False, style="yellow")
        lengths = [summary.mean_prompt_tokens for summary in rounds if summary.mean_prompt_tokens is not None]
        if lengths:
            console.print(f"{name}: prompts of {statistics.mean(lengths):.1f} tokens by its own count", markup=False)


def _ratio_table(rows: Sequence[Ratios]) -> Table:
    table = _table("ratios within a round: min / median / max", ("servers",), ("output tok/s", "TTFT p50", "TPOT p50"))
    for row in rows:
        spreads = (row.output_tok_s, row.ttft_p50, row.tpot_p50)
        table.add_row(f"{row.name} ÷ {row.other}", *map(_spread_cell, spreads))
    return table


def _spread_cell(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.min:.2f} / {spread.median:.2f} / {spread.max:.2f}"
