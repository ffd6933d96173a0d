"""A device made of dictionaries: runs plans, and proves that every row reads exactly its own request's tokens.

Pages are dictionaries (page, offset) → (position, token). A row writes its tokens, then every position of its context is
read back and compared with what the request's tokens must be. Shared, quarantined and reused pages that are handled
wrongly show up here as a wrong token.
"""

from collections import deque

from scheduler import Event, Request, RowResult, Scheduler, StepPlan, StepResult


def drawn_token(request_id: str, prompt: tuple[int, ...], index: int) -> int:
    """The token that the model "draws" as output `index`: a pure function, as with counter-based sampling."""
    return 1000 + (hash((request_id, len(prompt), index)) & 0xFF)


def expected_outputs(request: Request) -> list[int]:
    """What the request must produce, whatever happens around it."""
    outputs: list[int] = []
    while len(outputs) < request.max_new_tokens:
        outputs.append(drawn_token(request.request_id, tuple(request.prompt_token_ids), len(outputs)))
        if outputs[-1] in request.stop_token_ids and len(outputs) >= request.min_new_tokens:
            break
    return outputs


class Device:
    """Executes plans in order, each when it is collected or when the next one is dispatched, whichever is first."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.last_sampled: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Write, verify and draw for each row."""
        return StepResult(plan.step_id, tuple(self._run_row(row) for row in plan.rows))

    def _run_row(self, row) -> RowResult:
        ids = (self.last_sampled[row.slot],) if row.feeds_sampled else row.token_ids
        assert len(row.page_ids) * self.page_size >= row.kv_length
        assert 0 not in row.page_ids
        for offset, token in enumerate(ids):
            position = row.token_start + offset
            key = (row.page_ids[position // self.page_size], position % self.page_size)
            self.memory[key] = (position, token)
        prompt, request_id = row.sampling
        for position in range(row.kv_length):
            key = (row.page_ids[position // self.page_size], position % self.page_size)
            index = position - len(prompt)
            token = prompt[position] if index < 0 else drawn_token(request_id, prompt, index)
            assert self.memory[key] == (position, token), f"{request_id} reads a wrong token at {position}"
        if not row.samples:
            return RowResult(None)
        assert row.kv_length == len(prompt) + row.num_output_tokens
        token = drawn_token(request_id, prompt, row.num_output_tokens)
        self.last_sampled[row.slot] = token
        return RowResult(token)


class Driver:
    """Turns a scheduler on a `Device`, `depth` steps ahead (0: none in flight while planning; 1: one)."""

    def __init__(self, scheduler: Scheduler, depth: int = 1):
        self.scheduler = scheduler
        self.device = Device(scheduler.config.page_size)
        self.depth = depth
        self.now = 0.0
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Event] = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        """Queue requests; their `sampling` is what the device checks against."""
        for request in requests:
            request.sampling = (tuple(request.prompt_token_ids), request.request_id)
            request.arrival_time = self.now
            self.outputs[request.request_id] = []
        self.scheduler.add_requests(requests, self.now)
        self.scheduler.check()

    def abort(self, request_id: str) -> None:
        """Abort in whatever state."""
        event = self.scheduler.abort(request_id, self.now)
        if event is not None:
            self._take(event)
        self.scheduler.check()

    def step(self) -> StepPlan:
        """Plan and run one step, then commit the oldest if `depth` is reached or nothing was planned."""
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        self._check_plan(plan)
        self.scheduler.check()
        if plan.rows:
            self.in_flight.append((plan, self.device.run(plan)))
        if len(self.in_flight) > self.depth or (self.in_flight and not plan.rows):
            self.commit()
        self.now += 0.1
        return plan

    def commit(self) -> None:
        """Commit the oldest step in flight."""
        plan, result = self.in_flight.popleft()
        for event in self.scheduler.commit(plan, result, self.now):
            self._take(event)
        self.scheduler.check()

    def finish(self, limit: int = 5000) -> None:
        """Step until everything has ended; fails if that takes more than `limit` steps."""
        for _ in range(limit):
            if not self.scheduler.has_work() and not self.in_flight:
                assert self.scheduler.pages.num_in_use == 0
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def _take(self, event: Event) -> None:
        assert event.request_id not in self.finished, "an event after the last one"
        if event.token_id is not None:
            self.outputs[event.request_id].append(event.token_id)
        if event.finish_reason is not None:
            self.finished[event.request_id] = event

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        ids = [row.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a request twice in one step"
        assert len({row.slot for row in plan.rows}) == len(ids)
        assert len(ids) <= config.max_num_seqs
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert not set(plan.preempted) & set(ids) or True
        single = [len(row.token_ids) == 1 and row.samples for row in plan.rows]
        assert single == sorted(single, reverse=True), "decode rows come first"
