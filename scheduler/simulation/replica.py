"""One simulated engine: a `Scheduler`, a cost model, and the step that is under way. Driven by `Simulator`.

It does what `model/engine.py` does, in virtual time: with pipelining the next step is planned just before the results
of the one under way are known, so that a drawn token is *pending* in the plan after it, and a request that ends by a
stop token wastes one row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.config import SchedulerConfig
from scheduler.plan import Event, RowResult, StepPlan, StepResult
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.simulation.records import CostModel, StepShape, StepSpan

STOP_TOKEN = 1
STOP_TOKENS = frozenset({STOP_TOKEN})

_GOES_ON = RowResult(0)
_STOPS = RowResult(STOP_TOKEN)
_DRAWS_NOTHING = RowResult(None)


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    plan: StepPlan
    result: StepResult
    shape: StepShape
    started_at: float
    ends_at: float


class Replica:
    """A simulated engine. `add`, `wake` and `end_step` mutate; nothing blocks."""

    def __init__(self, name: str, config: SchedulerConfig, cost: CostModel, pipelined: bool = True):
        self.name = name
        self.scheduler = Scheduler(config)
        self.num_steps = 0
        self.spans: list[StepSpan] | None = None
        self._cost = cost
        self._pipelined = pipelined
        self._lengths: dict[str, int] = {}
        self._under_way: _StepUnderWay | None = None

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._lengths)

    @property
    def num_live_tokens(self) -> int:
        """Tokens that they will hold when they end. Routers weigh replicas by it."""
        return sum(self._lengths.values())

    def add(self, request: Request, output_length: int, now: float) -> None:
        """Queue a request that will stop after `output_length` tokens. Raises what `Scheduler.add_request` raises."""
        request.stop_token_ids = STOP_TOKENS
        self.scheduler.add_request(request, now)
        self._lengths[request.request_id] = output_length

    def shorten(self, request_id: str, output_length: int) -> None:
        """The request stops after `output_length` tokens, or with what it draws next if it has as many."""
        if request_id not in self._lengths:
            return
        self._lengths[request_id] = output_length
        if self._under_way is not None:
            self._under_way = _stopped(self._under_way, request_id, output_length)

    def drawing(self) -> Iterator[tuple[str, int]]:
        """Who draws a token in the step under way, and how many outputs that makes."""
        if self._under_way is not None:
            for row in self._under_way.plan.rows:
                if row.samples:
                    yield row.request_id, row.num_output_tokens + 1

    def abort(self, request_id: str, now: float) -> None:
        """End a request in any state, if it is live."""
        if self._lengths.pop(request_id, None) is not None:
            self.scheduler.abort(request_id, now)

    def wake(self, now: float) -> float | None:
        """Start a step if the device is idle and there is one to run. Returns when that step ends, if one started."""
        if self._under_way is not None:
            return None
        plan = self.scheduler.plan(now)
        return self._start(plan, now, self._cost.idle_start_seconds())

    def end_step(self, now: float) -> tuple[tuple[Event, ...], float | None]:
        """The step under way ends: its events, and when the next one ends, if there is one."""
        ended = self._under_way
        if ended is None:
            raise RuntimeError(f"{self.name} has no step under way")
        following = self.scheduler.plan(now) if self._pipelined else None
        events = self.scheduler.commit(ended.plan, ended.result, now)
        for event in events:
            if event.finish_reason is not None:
                del self._lengths[event.request_id]
        if self.spans is not None:
            span = StepSpan(self.name, ended.started_at, now, ended.shape, ended.plan.preempted)
            self.spans.append(span)
        self._under_way = None
        if following is None or not following.rows:
            following = self.scheduler.plan(now)
        return events, self._start(following, now, 0.0)

    def _start(self, plan: StepPlan, now: float, delay: float) -> float | None:
        rows = plan.rows
        if not rows:
            return None
        lengths = self._lengths
        num_tokens = num_prefill = num_kv = num_attended = 0
        results = []
        # By position, as rows are tuples: this loop sees every token of every simulated request.
        for row in rows:
            count = len(row[5])
            kv_length = row[4] + count
            num_tokens += count
            num_kv += kv_length
            num_attended += count * kv_length
            if row[8]:
                # One that has ended meanwhile has no length; what its row draws is dropped.
                results.append(_STOPS if row[10] + 1 >= lengths.get(row[0], 0) else _GOES_ON)
                if count > 1:
                    num_prefill += count
            else:
                results.append(_DRAWS_NOTHING)
                num_prefill += count
        shape = StepShape(len(rows), num_tokens, num_prefill, num_kv, num_attended)
        ends_at = now + delay + self._cost.step_seconds(shape)
        self.num_steps += 1
        self._under_way = _StepUnderWay(plan, StepResult(plan.step_id, tuple(results)), shape, now, ends_at)
        return ends_at


def _stopped(step: _StepUnderWay, request_id: str, output_length: int) -> _StepUnderWay:
    """The same step, but what the request draws in it is its last token if that makes `output_length` or more."""
    results = list(step.result.rows)
    for index, row in enumerate(step.plan.rows):
        if row.request_id == request_id and row.samples and row.num_output_tokens + 1 >= output_length:
            results[index] = _STOPS
    return replace(step, result=StepResult(step.plan.step_id, tuple(results)))
