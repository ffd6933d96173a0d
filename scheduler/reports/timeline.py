"""How many requests were waiting, running and put back, over time. Used by `html_report.py`.

A request that was put back counts as preempted until its next token; that needs recorded steps (see `lifecycle.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from scheduler.reports.lifecycle import WAITING, left_at, phases, preempted_phases, preempted_times
from scheduler.simulation.records import RunResult

NUM_BINS = 400


@dataclass(frozen=True, slots=True)
class Band:
    """A number of requests in each bin of time: the least, the mean over time, the most."""

    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """`times`: the middle of each bin, in seconds; empty for a run in which no time passed."""

    times: tuple[float, ...]
    waiting: Band
    running: Band
    preempted: Band


def timeline(result: RunResult, num_bins: int = NUM_BINS) -> Timeline:
    """Levels in `num_bins` equal bins from 0 to when the last request left.

    Raises:
        ValueError: no bin is asked for.
    """
    if num_bins < 1:
        raise ValueError("a timeline needs a bin")
    changes = _changes(result)
    end = max((left_at(outcome, result.duration) for outcome in result.outcomes), default=0.0)
    if end <= 0:
        nothing = Band((), (), ())
        return Timeline((), nothing, nothing, nothing)
    times = tuple(end * (index + 0.5) / num_bins for index in range(num_bins))
    bands = [_band([(time, delta[kind]) for time, delta in changes], end, num_bins) for kind in range(3)]
    return Timeline(times, *bands)


def _changes(result: RunResult) -> list[tuple[float, tuple[int, int, int]]]:
    """What is added to waiting, running and preempted, and when; ascending, one for each time."""
    put_back = preempted_times(result)
    moves: list[tuple[float, int, int]] = []
    for outcome in result.outcomes:
        for phase in phases(outcome, result.duration):
            kind = 0 if phase.name == WAITING else 1
            moves += ((phase.start, kind, 1), (phase.end, kind, -1))
        for phase in preempted_phases(outcome, result.duration, put_back):
            moves += ((phase.start, 1, -1), (phase.start, 2, 1), (phase.end, 2, -1), (phase.end, 1, 1))
    moves.sort()
    return [(time, _total(same)) for time, same in groupby(moves, key=lambda move: move[0])]


def _total(moves: Iterable[tuple[float, int, int]]) -> tuple[int, int, int]:
    totals = [0, 0, 0]
    for _, kind, delta in moves:
        totals[kind] += delta
    return totals[0], totals[1], totals[2]


def _band(changes: list[tuple[float, int]], end: float, num_bins: int) -> Band:
    width = end / num_bins
    low, high, area = [float("inf")] * num_bins, [0.0] * num_bins, [0.0] * num_bins
    level, since = 0, 0.0
    for time, delta in [*changes, (end, 0)]:
        if time > since:
            first = min(int(since / width), num_bins - 1)
            for index in range(first, min(int(time / width), num_bins - 1) + 1):
                overlap = min(time, (index + 1) * width) - max(since, index * width)
                if overlap > 0:
                    low[index], high[index] = min(low[index], level), max(high[index], level)
                    area[index] += level * overlap
        level, since = level + delta, max(time, since)
    return Band(
        tuple(0.0 if value == float("inf") else value for value in low),
        tuple(value / width for value in area),
        tuple(high),
    )
