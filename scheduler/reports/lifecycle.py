"""Where a request was, when: queued, in prefill, in decode, put back. Used by timelines, traces and `summary.py`.

An outcome does not say when a request was put back, and a step does not say who was in it. So the time of being put
back is read from the steps, where they were recorded, and lasts until the request's next token.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler.simulation.records import Outcome, RunResult

WAITING, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"


class Phase(NamedTuple):
    """Part of a request's life, in seconds of the run."""

    name: str
    start: float
    end: float


def left_at(outcome: Outcome, duration: float) -> float:
    """When a request left the system: its end; without one, its last token, its start or its arrival.

    A request that was still there when the run ended stays until `duration`.
    """
    if outcome.finished_at is not None:
        return outcome.finished_at
    if not outcome.finish_reason:
        return max(duration, outcome.arrival.time)
    if outcome.token_times:
        return outcome.token_times[-1]
    return outcome.arrival.time if outcome.started_at is None else outcome.started_at


def phases(outcome: Outcome, duration: float) -> list[Phase]:
    """Its queued, prefill and decode time, those that it came to, one after the other; none for a refused request."""
    if outcome.finish_reason == "refused":
        return []
    end = left_at(outcome, duration)
    started, first = outcome.started_at, outcome.first_token_at
    found = [Phase(WAITING, outcome.arrival.time, end if started is None else started)]
    if started is not None:
        found.append(Phase(PREFILL, started, end if first is None else first))
    if first is not None:
        found.append(Phase(DECODE, first, end))
    return found


def preempted_times(result: RunResult) -> dict[str, list[float]]:
    """When each request was put back, ascending, of the requests that were; empty without recorded steps."""
    found: dict[str, list[float]] = {}
    for step in sorted(result.steps, key=lambda step: step.start):
        for request_id in step.preempted:
            found.setdefault(request_id, []).append(step.start)
    return found


def preempted_phases(outcome: Outcome, duration: float, put_back: Mapping[str, Sequence[float]]) -> list[Phase]:
    """From each time of being put back to the next token, or to the end; apart from each other and ascending."""
    end = left_at(outcome, duration)
    times = outcome.token_times
    found: list[Phase] = []
    for start in put_back.get(outcome.arrival.request_id, ()):
        if start >= end or (found and start < found[-1].end):
            continue
        following = bisect_right(times, start)
        found.append(Phase(PREEMPTED, start, times[following] if following < len(times) else end))
    return found
