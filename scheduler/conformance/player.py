"""Plays a script: `scheduler.Scheduler` with the policy on trial, and a device made of a dictionary.

The device draws tokens that depend on every position that a row's attention reads, so that a page that is shared,
reused or let go wrongly shows up as a wrong token.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from zlib import crc32

from scheduler.config import SchedulerConfig
from scheduler.conformance.scripts import Abort, Arrive, Operation, Script, Step
from scheduler.conformance.watch import Violation, Watch, watched
from scheduler.plan import Event, PlannedRow, RowResult, StepPlan, StepResult
from scheduler.policies.base import Policy
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

NUM_TOKENS = 64
_STUCK_AFTER = 200


class Device:
    """Executes plans. Each position of a page holds a checksum of all tokens up to it, as its KV would."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._memory: dict[tuple[int, int], int] = {}
        self._last_drawn: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Write and draw for each row."""
        return StepResult(plan.step_id, tuple(self._run_row(row) for row in plan.rows))

    def _run_row(self, row: PlannedRow) -> RowResult:
        ids = (self._last_drawn.get(row.slot, 0),) if row.feeds_sampled else row.token_ids
        before = self._memory.get(self._place(row, row.token_start - 1), 0) if row.token_start else 0
        for position, token in enumerate(ids, row.token_start):
            before = _checksum(before, token)
            self._memory[self._place(row, position)] = before
        if not row.samples:
            return RowResult(None)
        context = [self._memory.get(self._place(row, position), 0) for position in range(row.kv_length)]
        token = _drawn_token(context, row.sampling)
        self._last_drawn[row.slot] = token
        return RowResult(token)

    def _place(self, row: PlannedRow, position: int) -> tuple[int, int]:
        return (row.page_ids[position // self._page_size], position % self._page_size)


class QuickDevice(Device):
    """Draws the same token always, for long runs in which tokens do not matter."""

    def run(self, plan: StepPlan) -> StepResult:
        """Draw for each row."""
        return StepResult(
            plan.step_id, tuple(RowResult(NUM_TOKENS - 1) if row.samples else RowResult(None) for row in plan.rows)
        )


def tokens_alone(request: Request) -> list[int]:
    """What a request draws when it has the device for itself."""
    context: list[int] = []
    for token in request.prompt_token_ids:
        context.append(_checksum(context[-1] if context else 0, token))
    outputs: list[int] = []
    while len(outputs) < request.max_new_tokens:
        outputs.append(_drawn_token(context, request.sampling))
        if outputs[-1] in request.stop_token_ids:
            break
        context.append(_checksum(context[-1], outputs[-1]))
    return outputs


def _checksum(before: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), before)


def _drawn_token(context: Sequence[int], seed: object) -> int:
    return crc32(repr(seed).encode(), crc32(array("Q", context).tobytes())) % NUM_TOKENS


class Player:
    """One run of one script with one policy. `play` and `finish` mutate; Violation comes out of a broken policy."""

    def __init__(
        self,
        script: Script,
        config: SchedulerConfig,
        policy: Policy,
        compares: bool = False,
        quick: bool = False,
        after_plan: "Callable[[Player, StepPlan], None] | None" = None,
        after_operation: "Callable[[Player], None] | None" = None,
    ):
        """`compares` requests around every call of the policy; `quick` leaves the tokens out.

        `after_plan` is called with each plan, `after_operation` after each arrival, abort, plan and commit.
        """
        self.policy = policy
        self.watch = Watch(compares)
        self.scheduler = Scheduler(script.configured(config), watched(policy, self.watch))
        self.requests: list[Request] = []
        self.specifications: list[Arrive] = []
        self.last_events: dict[str, Event] = {}
        self.outputs: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0
        self._script = script
        self._device = (QuickDevice if quick else Device)(script.page_size)
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._after_plan = after_plan
        self._after_operation = after_operation

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended, by arrival."""
        return list(self.watch.requests.values())

    @property
    def running(self) -> list[Request]:
        """Those that have a slot."""
        return [request for request in self.live if request.status is RequestStatus.RUNNING]

    @property
    def waiting(self) -> list[Request]:
        """Those that have none."""
        return [request for request in self.live if request.status is not RequestStatus.RUNNING]

    @property
    def num_in_flight(self) -> int:
        """Steps that are not committed."""
        return len(self._in_flight)

    def play(self) -> None:
        """Every operation of the script, in order."""
        for operation in self._script.operations:
            self._perform(operation)

    def finish(self, max_steps: int) -> bool:
        """Step until every request has ended; False if that takes longer, or nothing has happened for long."""
        idle = 0
        for _ in range(max_steps):
            if not self.watch.requests and not self._in_flight:
                return True
            idle = 0 if self._step().rows or self._in_flight else idle + 1
            if idle > _STUCK_AFTER:
                return False
        return not self.watch.requests

    def _perform(self, operation: Operation) -> None:
        match operation:
            case Arrive():
                self._add(operation)
            case Abort():
                name = f"r{operation.index}"
                if name in self.watch.requests:
                    event = self.scheduler.abort(name, self.now)
                    if event is not None:
                        self._take(event)
                    self._operation_done()
            case Step():
                for _ in range(operation.count):
                    self._step()
            case _:
                self.now += operation.seconds

    def _add(self, specification: Arrive) -> None:
        request = specification.request(len(self.requests))
        request.arrival_time = self.now
        self.requests.append(request)
        self.specifications.append(specification)
        self.watch.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request, self.now)
        self._operation_done()

    def _step(self) -> StepPlan:
        """Plan a step and run it; commit the oldest in flight if there are too many, or nothing was planned."""
        self.watch.begin_plan()
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        if self._after_plan is not None:
            self._after_plan(self, plan)
        self._operation_done()
        if plan.rows:
            self._in_flight.append((plan, self._device.run(plan)))
        self.now += self._script.seconds_per_step
        if len(self._in_flight) > self._script.pipelined or (self._in_flight and not plan.rows):
            for event in self.scheduler.commit(*self._in_flight.popleft(), self.now):
                self._take(event)
            self._operation_done()
        return plan

    def _take(self, event: Event) -> None:
        name = event.request_id
        if name in self.last_events:
            raise Violation(f"{name} ended twice")
        if event.token_id is not None:
            self.outputs[name].append(event.token_id)
        if event.finish_reason is not None:
            self.last_events[name] = event
            del self.watch.requests[name]

    def _operation_done(self) -> None:
        if self._after_operation is not None:
            self._after_operation(self)
