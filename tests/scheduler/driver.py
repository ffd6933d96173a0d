"""A device made of dictionaries: runs plans, and proves that every row reads exactly its own request's tokens.

A page's offset remembers which token was written there, and after which tokens, so a page that is shared, reused or let
go wrongly shows up as a wrong word. Free pages are wiped. `Driver` turns a scheduler on such a device and
checks every plan and every invariant on the way.
"""

from collections import deque
from collections.abc import Sequence
from zlib import crc32

from scheduler import (
    Event,
    PlannedRow,
    Request,
    RequestStatus,
    RowResult,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)


def drawn_token(request_id: str, prompt: Sequence[int], index: int) -> int:
    """The token that the model "draws" as output `index`: a pure function, as with counter-based sampling."""
    return 1000 + (crc32(f"{request_id} {len(prompt)} {index}".encode()) & 0xFF)


def expected_outputs(request: Request) -> list[int]:
    """What the request must produce, whatever happens around it."""
    outputs: list[int] = []
    while len(outputs) < request.max_new_tokens:
        outputs.append(drawn_token(request.request_id, request.prompt_token_ids, len(outputs)))
        if outputs[-1] in request.stop_token_ids and len(outputs) >= request.min_new_tokens:
            break
    return outputs


def make_scheduler(**fields: object) -> Scheduler:
    """A scheduler with small limits, unless told otherwise."""
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_pages": 64, "page_size": 4}
    return Scheduler(SchedulerConfig(**{**small, **fields}))  # type: ignore[arg-type]


def make_request(request_id: str, length: int = 8, max_new_tokens: int = 8, **fields: object) -> Request:
    """A request whose prompt is like no other's."""
    first = crc32(request_id.encode()) % 10**6 * 1000 + 10**4
    prompt = tuple(range(first, first + length))
    return Request(request_id, prompt, max_new_tokens, **fields)  # type: ignore[arg-type]


class Device:
    """Executes plans in order, at dispatch, as a real device would."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.last_sampled: dict[int, int] = {}
        self.slot_owner: dict[int, tuple[object, int]] = {}
        self.num_computed = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Write, verify and draw for each row."""
        return StepResult(plan.step_id, tuple(self._run_row(row) for row in plan.rows))

    def wipe(self, pages: Sequence[int]) -> None:
        """Forget what these pages held."""
        for page in pages:
            for offset in range(self.page_size):
                self.memory.pop((page, offset), None)

    def _run_row(self, row: PlannedRow) -> RowResult:
        assert len(row.page_ids) * self.page_size >= row.kv_length
        assert 0 not in row.page_ids
        assert row.starts == (self.slot_owner.get(row.slot) != (row.sampling, row.attempt))
        self.slot_owner[row.slot] = (row.sampling, row.attempt)
        prompt, request_id = row.sampling  # type: ignore[misc]
        words = self._words(prompt, request_id, row.kv_length)
        ids = (self.last_sampled[row.slot],) if row.feeds_sampled else row.token_ids
        for position, token in enumerate(ids, row.token_start):
            self.memory[row.page_ids[position // self.page_size], position % self.page_size] = (
                token,
                words[position][1],
            )
        self.num_computed += len(ids)
        for position in range(row.kv_length):
            found = self.memory.get((row.page_ids[position // self.page_size], position % self.page_size))
            assert found == words[position], f"{request_id} reads a wrong token at {position}"
        self._check_texts(row, prompt, request_id)
        if not row.samples:
            return RowResult(None)
        assert row.kv_length == len(prompt) + row.num_output_tokens
        token = drawn_token(request_id, prompt, row.num_output_tokens)
        self.last_sampled[row.slot] = token
        return RowResult(token)

    def _words(self, prompt: Sequence[int], request_id: str, length: int) -> list[tuple[int, int]]:
        """For each position its token and a hash of everything up to it, on which its KV depends."""
        words = []
        before = 0
        for position in range(length):
            index = position - len(prompt)
            token = prompt[position] if index < 0 else drawn_token(request_id, prompt, index)
            before = hash((before, token))
            words.append((token, before))
        return words

    def _check_texts(self, row: PlannedRow, prompt: Sequence[int], request_id: str) -> None:
        end = row.kv_length
        assert row.num_prompt_tokens == len(prompt)
        assert row.next_token_ids == tuple(prompt[row.token_start + 1 : end + 1])
        if row.starts:
            outputs = tuple(drawn_token(request_id, prompt, index) for index in range(row.num_output_tokens))
            assert (row.prompt_token_ids, row.output_token_ids) == (tuple(prompt), outputs)
        else:
            assert (row.prompt_token_ids, row.output_token_ids) == ((), ())


class Driver:
    """Turns a scheduler on a `Device`, `depth` steps ahead (0: none in flight while planning; 1: one)."""

    def __init__(self, scheduler: Scheduler, depth: int = 0, seconds_per_step: float = 0.1):
        self.scheduler = scheduler
        self.device = Device(scheduler.config.page_size)
        self.depth = depth
        self.now = 0.0
        self.seconds_per_step = seconds_per_step
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Event] = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        """Queue requests; their `sampling` is what the device checks against."""
        for request in requests:
            request.sampling = (tuple(request.prompt_token_ids), request.request_id)
            request.arrival_time = self.now
        self.scheduler.add_requests(requests, self.now)
        for request in requests:
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.finished.pop(request.request_id, None)
        self._check()

    def abort(self, request_id: str) -> None:
        """Abort in whatever state; a second time does nothing."""
        event = self.scheduler.abort(request_id, self.now)
        if event is not None:
            self._take(event)
        assert self.scheduler.abort(request_id, self.now) is None
        self._check()

    def plan(self) -> StepPlan:
        """Plan a step and hand it to the device."""
        decoding = [
            request
            for request in self.requests.values()
            if request.status is RequestStatus.RUNNING
            and request.num_uncomputed_tokens == 1
            and len(request.output_token_ids) + request.num_pending_tokens < max(request.max_new_tokens, 1)
        ]
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        self._check_plan(plan)
        self._check_survivors(plan, decoding)
        self._check()
        if plan.rows:
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def step(self) -> StepPlan:
        """Plan and run one step, then commit the oldest if `depth` is reached or nothing was planned."""
        plan = self.plan()
        if len(self.in_flight) > self.depth or (self.in_flight and not plan.rows):
            self.commit()
        self.now += self.seconds_per_step
        return plan

    def commit(self) -> tuple[Event, ...]:
        """Commit the oldest step in flight."""
        plan, result = self.in_flight.popleft()
        events = self.scheduler.commit(plan, result, self.now)
        for event in events:
            self._take(event)
        self._check()
        return events

    def finish(self, limit: int = 5000) -> None:
        """Step until everything has ended; fails if that takes more than `limit` steps."""
        for _ in range(limit):
            if not self.scheduler.has_work() and not self.in_flight:
                assert self.scheduler.pages.num_in_use == 0
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def check_outputs(self) -> None:
        """Whoever was not aborted must have exactly the tokens of a run alone; who was, a beginning of them."""
        for request_id, request in self.requests.items():
            outputs = self.outputs[request_id]
            wanted = expected_outputs(request)
            reason = self.finished[request_id].finish_reason
            if reason in ("abort", "error"):
                assert outputs == wanted[: len(outputs)]
                continue
            assert outputs == wanted
            stops = bool(outputs) and outputs[-1] in request.stop_token_ids and len(outputs) >= request.min_new_tokens
            assert reason == ("stop" if stops else "length")

    @property
    def running(self) -> list[str]:
        """Ids of the running, by order of being added."""
        return [name for name, request in self.requests.items() if request.status is RequestStatus.RUNNING]

    def _take(self, event: Event) -> None:
        assert event.request_id not in self.finished, "an event after the last one"
        if event.token_id is not None:
            self.outputs[event.request_id].append(event.token_id)
        if event.finish_reason is not None:
            self.finished[event.request_id] = event

    def _check(self) -> None:
        self.scheduler.check()
        self.device.wipe(self.scheduler.pages.free_pages())

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        ids = [row.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a request twice in one step"
        assert len({row.slot for row in plan.rows}) == len(ids)
        assert all(0 <= row.slot < config.max_num_seqs for row in plan.rows)
        assert plan.num_tokens <= config.max_num_batched_tokens
        single = [len(row.token_ids) == 1 and row.samples for row in plan.rows]
        assert single == sorted(single, reverse=True), "decode rows come first"
        for row in plan.rows:
            self._check_written_pages(row)

    def _check_written_pages(self, row: PlannedRow) -> None:
        """Nobody else holds a page that is written, and no step in flight has it for another request."""
        size = self.scheduler.config.page_size
        for page in row.page_ids[row.token_start // size : -(-row.kv_length // size)]:
            assert self.scheduler.pages.num_references(page) == 1
            for earlier, _ in self.in_flight:
                for other in earlier.rows:
                    same = (other.request_id, other.attempt) == (row.request_id, row.attempt)
                    assert same or page not in other.page_ids, "a page of a step in flight was handed out"

    def _check_survivors(self, plan: StepPlan, decoding: Sequence[Request]) -> None:
        """Nobody who decodes is left out, unless pages are in quarantine."""
        if not self.scheduler.pages.num_quarantined:
            planned = {row.request_id for row in plan.rows}
            assert all(
                request.request_id in planned or request.request_id in plan.preempted
                for request in decoding
                if request.status is RequestStatus.RUNNING
            )
