"""A run as a trace in Chrome's trace-event format (JSON), which ui.perfetto.dev and chrome://tracing open.

Called with a stream that the caller has opened. Events go out one by one in order of time. What is held in memory is an
iterator for each request in the system at that time, never the trace. Each replica is a process: its steps are complete
events (`X`) on a thread, its requests nested async events (`b`, `e`), its numbers of requests counters (`C`).

The format is described in "Trace Event Format" (Google, 2016); `ts` and `dur` are microseconds with three decimals.
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from scheduler.reports.grid import printable
from scheduler.reports.lifecycle import (
    PREEMPTED,
    WAITING,
    left_at,
    phases,
    preempted_phases,
    preempted_times,
)
from scheduler.simulation.records import Outcome, RunResult, StepSpan

NO_REPLICA = "no replica"
KINDS = ("running", "waiting", "preempted")

type Args = dict[str, str | int | float]


class _Event(NamedTuple):
    """An event before it is JSON. `fields` is what its kind adds; `moves` are changes of a process's counters."""

    time: int
    process: int
    kind: str
    name: str
    fields: str
    moves: tuple[tuple[str, int], ...] = ()


def write_trace(stream: TextIO, result: RunResult) -> None:
    """Write the whole trace. Steps are in it if the run recorded them; requests always."""
    processes = _processes(result)
    stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    for line in _lines(result, processes):
        stream.write(separator + line)
        separator = ",\n"
    stream.write("\n]}\n")


def _processes(result: RunResult) -> dict[str, int]:
    """A number for each replica. 0 is left out: Perfetto takes it for the idle process."""
    names = {step.replica for step in result.steps} | {outcome.replica for outcome in result.outcomes}
    return {name: number for number, name in enumerate(sorted(names), start=1)}


def _lines(result: RunResult, processes: Mapping[str, int]) -> Iterator[str]:
    for name, process in processes.items():
        shown = printable(name) or NO_REPLICA
        yield _json(_Event(0, process, "M", "process_name", _fields({"name": shown})))
        yield _json(_Event(0, process, "M", "process_sort_index", _fields({"sort_index": process})))
        yield _json(_Event(0, process, "M", "thread_name", _fields({"name": "steps"})))
    levels = {process: dict.fromkeys(KINDS, 0) for process in processes.values()}
    changed: dict[int, None] = {}
    now = 0
    events = heapq.merge(
        _step_events(result.steps, processes), _request_events(result, processes), key=lambda event: event.time
    )
    for event in events:
        if event.time > now:
            yield from _counters(now, levels, changed)
            now = event.time
        for kind, delta in event.moves:
            levels[event.process][kind] += delta
            changed[event.process] = None
        yield _json(event)
    yield from _counters(now, levels, changed)


def _counters(time: int, levels: Mapping[int, Mapping[str, int]], changed: dict[int, None]) -> Iterator[str]:
    """Counters of the processes in which something changed, once all that happens at `time` has been counted."""
    for process in changed:
        yield _json(_Event(time, process, "C", "requests", _fields(dict(levels[process]))))
    changed.clear()


def _step_events(steps: Sequence[StepSpan], processes: Mapping[str, int]) -> Iterator[_Event]:
    """Complete events. Steps of a replica that overlap go to threads of their own: slices of a thread must nest."""
    ends: dict[int, list[int]] = {}
    for step in sorted(steps, key=lambda step: (step.start, step.end, step.replica)):
        process = processes[step.replica]
        start, end = _nanoseconds(step.start), _nanoseconds(max(step.start, step.end))
        threads = ends.setdefault(process, [])
        thread = next((index for index, last in enumerate(threads) if last <= start), len(threads))
        threads[thread : thread + 1] = [end]
        shape = step.shape
        args: Args = {
            "rows": shape.num_rows,
            "tokens": shape.num_tokens,
            "prefill tokens": shape.num_prefill_tokens,
            "kv tokens": shape.num_kv_tokens,
            "attended": shape.num_attended,
            "preempted": len(step.preempted),
        }
        fields = f'"cat":"step","dur":{_microseconds(end - start)},{_fields(args, thread + 1)}'
        yield _Event(start, process, "X", "prefill step" if shape.num_prefill_tokens else "decode step", fields)


def _request_events(result: RunResult, processes: Mapping[str, int]) -> Iterator[_Event]:
    """Events of all requests in order of time. A request is looked at when it arrives, and forgotten when it leaves."""
    put_back = preempted_times(result)
    open_requests: list[tuple[int, int, _Event, Iterator[_Event]]] = []
    arriving = sorted(result.outcomes, key=lambda outcome: outcome.arrival.time)
    for number, outcome in enumerate(arriving, start=1):
        now = _nanoseconds(outcome.arrival.time)
        yield from _until(now, open_requests)
        events = iter(_events_of(outcome, result.duration, put_back, processes[outcome.replica], number))
        heapq.heappush(open_requests, (now, number, next(events), events))
    yield from _until(None, open_requests)


def _until(end: int | None, open_requests: list[tuple[int, int, _Event, Iterator[_Event]]]) -> Iterator[_Event]:
    while open_requests and (end is None or open_requests[0][0] <= end):
        _, number, event, events = open_requests[0]
        yield event
        following = next(events, None)
        if following is None:
            heapq.heappop(open_requests)
        else:
            heapq.heapreplace(open_requests, (following.time, number, following, events))


def _events_of(
    outcome: Outcome, duration: float, put_back: Mapping[str, Sequence[float]], process: int, number: int
) -> list[_Event]:
    """One request: a span from arrival to end, its phases inside that, and being put back inside those."""
    spans = [(phase.name, phase.start, phase.end, 1) for phase in phases(outcome, duration)]
    outer = list(spans)
    for phase in preempted_phases(outcome, duration, put_back):
        # One that reaches over a phase's end is cut there, so that spans nest.
        pieces = ((max(phase.start, start), min(phase.end, end)) for _, start, end, _ in outer)
        spans += [(PREEMPTED, start, end, 2) for start, end in pieces if start < end]
    end = left_at(outcome, duration)
    spans.append(("request", outcome.arrival.time, end, 0))
    return _nested(spans, process, number, _args(outcome))


def _nested(spans: Iterable[tuple[str, float, float, int]], process: int, number: int, args: Args) -> list[_Event]:
    """Begin and end events of spans (name, start, end, depth), in an order in which they nest."""
    identity = f'"cat":"request","id2":{{"local":"0x{number:x}"}},'
    open_spans: list[tuple[int, str]] = []
    events: list[_Event] = []

    def close(before: int | None, depth: int) -> None:
        while open_spans and (before is None or open_spans[-1][0] <= before) and len(open_spans) > depth:
            end, name = open_spans.pop()
            events.append(_Event(end, process, "e", name, identity + _fields({}), _moves(name, -1)))

    for name, start, end, depth in sorted(spans, key=lambda span: (span[1], span[3], span[2])):
        begin = _nanoseconds(start)
        close(begin, depth)
        added = args if depth == 0 else {}
        events.append(_Event(begin, process, "b", name, identity + _fields(added), _moves(name, 1)))
        open_spans.append((max(begin, _nanoseconds(end)), name))
    close(None, 0)
    return events


def _moves(name: str, delta: int) -> tuple[tuple[str, int], ...]:
    if name == "request":
        return ()
    if name == PREEMPTED:
        return (("running", -delta), ("preempted", delta))
    return (("waiting" if name == WAITING else "running", delta),)


def _args(outcome: Outcome) -> Args:
    arrival = outcome.arrival
    return {
        "request": printable(arrival.request_id),
        "tenant": printable(arrival.tenant or ""),
        "priority": arrival.priority,
        "input tokens": arrival.input_length,
        "output tokens": len(outcome.token_times),
        "cached tokens": outcome.num_cached_tokens,
        "preemptions": outcome.num_preemptions,
        "wasted tokens": outcome.num_wasted_tokens,
        "transfer seconds": outcome.transfer_seconds,
        "finish reason": outcome.finish_reason or "unfinished",
    }


def _fields(args: Args, thread: int = 1) -> str:
    return f'"tid":{thread},"args":{json.dumps(args, separators=(",", ":"))}'


def _json(event: _Event) -> str:
    name = json.dumps(event.name)
    return (
        f'{{"ph":"{event.kind}","ts":{_microseconds(event.time)},"pid":{event.process},"name":{name},{event.fields}}}'
    )


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
