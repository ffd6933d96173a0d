"""The scheduler: who runs in the next step, on which pages, and what a step's results mean. Pure: time is passed in.

Called by `model/engine.py` and by simulations: `plan`, then run the plan somewhere, then `commit`. There is no prefill
or decode phase: every request has computed tokens that chase its known tokens, and a step hands out a token budget.
A plan may be made while the one before it still runs; a token that is being drawn is then *pending*.
"""

from collections import deque
from collections.abc import Sequence

from scheduler.admission import Admission
from scheduler.config import SchedulerConfig
from scheduler.errors import DuplicateRequestError, InvariantError, NeverFitsError, QueueFullError
from scheduler.invariants import check_scheduler
from scheduler.pages import PagePool
from scheduler.plan import Event, PlannedRow, RowResult, SchedulerStats, StepPlan, StepResult
from scheduler.queues import WaitingQueue, make_policy
from scheduler.request import FinishReason, Request, RequestStatus


class Scheduler:
    """Every decision about requests and pages. Not thread-safe; nothing here blocks.

    All methods but `stats`, `check`, `has_work`, `get` and `max_new_tokens_for` mutate.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pages = PagePool(config.num_pages, config.page_size, config.enable_prefix_reuse)
        self._policy = make_policy(config)
        self._waiting = WaitingQueue(self._policy)
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._step_id = 0
        self._sequence = 0
        self._admission = Admission(config, self.pages, self._policy, self._waiting, self._running, self._put_back)
        self._preempted: list[str] = []
        self._num_preemptions = 0

    # -- requests in and out ------------------------------------------------------------------------------------------

    def max_new_tokens_for(self, prompt_length: int) -> int:
        """Output tokens that a prompt leaves room for, in the context and in the pool; not positive if it has none.

        The KV of the last token drawn is never needed, so the pool must hold one token less than the context.
        """
        pool_tokens = self.config.num_pages * self.config.page_size
        return min(self.config.max_model_len - prompt_length, pool_tokens + 1 - prompt_length)

    def add_request(self, request: Request, now: float) -> None:
        """Queue one request; see `add_requests`."""
        self.add_requests((request,), now)

    def add_requests(self, requests: Sequence[Request], now: float) -> None:
        """Queue requests in this order, all or none.

        Raises:
            QueueFullError: they would leave more than `max_queue_size` waiting beyond the free slots.
            NeverFitsError: one could not fit the context or the pool even alone.
            DuplicateRequestError: an id is live already, or given twice.
        """
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or any(request_id in self._requests for request_id in ids):
            raise DuplicateRequestError("a request id is already in use")
        for request in requests:
            self._check_fits(request)
        free_slots = max(0, self.config.max_num_seqs - len(self._running))
        if len(self._waiting) + len(requests) > self.config.max_queue_size + free_slots:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting; the queue holds {self.config.max_queue_size}"
            )
        for request in requests:
            self._sequence += 1
            request.sequence = self._sequence
            request.prompt_token_ids = tuple(request.prompt_token_ids)
            self._requests[request.request_id] = request
            self._waiting.push(request)

    def _check_fits(self, request: Request) -> None:
        length = request.num_prompt_tokens
        if length < 1:
            raise NeverFitsError("a prompt needs at least one token")
        if length + request.max_new_tokens > self.config.max_model_len:
            raise NeverFitsError(
                f"{length} prompt tokens and {request.max_new_tokens} new ones exceed the context of "
                f"{self.config.max_model_len} tokens"
            )
        pool_tokens = self.config.num_pages * self.config.page_size
        if length + max(request.max_new_tokens - 1, 0) > pool_tokens:
            raise NeverFitsError(
                f"{length} prompt tokens and {request.max_new_tokens} new ones exceed the KV pool of {pool_tokens} tokens"
            )

    def get(self, request_id: str) -> Request | None:
        """The live request with this id, for reading."""
        return self._requests.get(request_id)

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> Event | None:
        """End a request in any state; its pages are free at once, but for those that a step in flight may touch.

        Returns its last event, or None if no such request is live.
        """
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    def fail_all(self, error: str, now: float) -> tuple[Event, ...]:
        """End every request with an error, and forget the steps in flight: the device is gone."""
        events = tuple(self._finish(request, FinishReason.ERROR, error) for request in list(self._requests.values()))
        while self._in_flight:
            self.pages.end_quarantine(self._in_flight.popleft().step_id)
        return events

    # -- planning -----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether `plan` could find something to run, now or once the steps in flight are committed."""
        return bool(self._waiting) or bool(self._running)

    @property
    def num_in_flight(self) -> int:
        """Plans that are not committed yet."""
        return len(self._in_flight)

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. A plan with rows must be committed before the next but one is made.

        Raises:
            InvariantError: two plans are in flight already.
        """
        if len(self._in_flight) > 1:
            raise InvariantError("two plans are in flight; commit the older one first")
        self._preempted = []
        self._running.sort(key=self._policy.running_key)
        self._reserve_growth()
        if not self._preempted:
            self._admission.admit(now)
        rows = self._rows()
        plan = StepPlan(self._step_id + 1, rows, tuple(self._preempted))
        if rows:
            self._step_id += 1
            self._in_flight.append(plan)
        return plan

    def _wants(self, request: Request) -> int:
        """Tokens that the request could compute now; 0 when the token that is pending will be its last."""
        if request.num_pending_tokens and len(request.output_token_ids) + 1 >= request.max_new_tokens:
            return 0
        return request.num_uncomputed_tokens

    def _reserve_growth(self) -> None:
        """Give every running request the page for its next token, the most important first.

        When no page is left the least important running request is put back, which may be the one that asks. This comes
        before any row is built, so no planned row is ever taken back.
        """
        size = self.config.page_size
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING or not self._wants(request):
                continue
            while len(request.page_ids) * size <= request.num_computed_tokens:
                if self.pages.num_available:
                    request.page_ids.extend(self.pages.allocate(1))
                    continue
                if self.pages.num_quarantined:
                    break  # a page comes back when the step in flight ends; nobody is put back for that
                victim = self._running[-1]
                self._put_back(victim)
                if victim is request:
                    break

    def _rows(self) -> tuple[PlannedRow, ...]:
        """Hand out the token budget: one token to each request that decodes, the rest to prompts by importance."""
        budget = self.config.max_num_batched_tokens
        size = self.config.page_size
        self._running.sort(key=self._policy.running_key)
        candidates = self._running
        if len(candidates) > budget:
            # Too many for one step: those that have waited longest for a row go first, so that nobody starves.
            candidates = sorted(candidates, key=lambda request: request.last_step)[:budget]
        singles: list[Request] = []
        chunks: list[Request] = []
        for request in candidates:
            wants = self._wants(request)
            if wants and len(request.page_ids) * size > request.num_computed_tokens:
                (singles if wants == 1 else chunks).append(request)
        decodes = [self._row(request, 1) for request in singles]
        budget -= len(decodes)
        prefills = []
        for index, request in enumerate(chunks):
            # The chunks behind keep a token each, when everybody is rotated through a budget this small.
            reserved = len(chunks) - index - 1 if candidates is not self._running else 0
            count = min(self._wants(request), budget - reserved)
            if count <= 0:
                break
            budget -= count
            prefills.append(self._row(request, count))
        decodes.sort(key=lambda row: not row.samples)
        return (*decodes, *prefills)

    def _row(self, request: Request, count: int) -> PlannedRow:
        start = request.num_computed_tokens
        known = request.num_known_tokens
        feeds_sampled = start == known
        end = start + count
        samples = end == known + request.num_pending_tokens and request.max_new_tokens > 0
        starts = request.last_step == 0
        request.last_step = self._step_id + 1
        request.num_computed_tokens = end
        num_outputs = len(request.output_token_ids) + request.num_pending_tokens
        request.num_pending_tokens += samples
        if len(request.page_ids_snapshot) != len(request.page_ids):
            request.page_ids_snapshot = tuple(request.page_ids)
        prompt = request.prompt_token_ids
        if request.slot is None:
            raise InvariantError(f"{request.request_id} runs without a slot")
        return PlannedRow(
            request_id=request.request_id,
            attempt=request.attempt,
            slot=request.slot,
            starts=starts,
            token_start=start,
            token_ids=(0,) if feeds_sampled else request.tokens(start, end),
            feeds_sampled=feeds_sampled,
            page_ids=request.page_ids_snapshot,
            samples=samples,
            num_prompt_tokens=len(prompt),
            num_output_tokens=num_outputs,
            prompt_token_ids=tuple(prompt) if starts else (),
            output_token_ids=tuple(request.output_token_ids) if starts else (),
            next_token_ids=() if start >= len(prompt) else tuple(prompt[start + 1 : end + 1]),
            sampling=request.sampling,
        )

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> tuple[Event, ...]:
        """Take in the results of the oldest plan in flight. Rows of requests that ended or were put back are dropped.

        Raises:
            InvariantError: the plan is not the oldest in flight, or the result does not belong to it.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise InvariantError("plans are committed in the order in which they were made")
        if result.step_id != plan.step_id or len(result.rows) != len(plan.rows):
            raise InvariantError("the result does not belong to the plan")
        self._in_flight.popleft()
        self.pages.end_quarantine(plan.step_id)
        events = []
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            request = self._requests.get(row.request_id)
            if request is None or request.attempt != row.attempt or request.status is not RequestStatus.RUNNING:
                continue
            event = self._commit_row(request, row, outcome)
            if event is not None:
                events.append(event)
        return tuple(events)

    def _commit_row(self, request: Request, row: PlannedRow, outcome: RowResult) -> Event | None:
        if outcome.error is not None:
            return self._finish(request, FinishReason.ERROR, outcome.error)
        if row.samples:
            if outcome.token_id is None:
                raise InvariantError(f"a row of {row.request_id} should have drawn a token")
            request.num_pending_tokens -= 1
            request.output_token_ids.append(outcome.token_id)
        self._register_pages(request, row.kv_length)
        reason = self._finish_reason(request, row)
        if reason is None and not row.samples and outcome.prompt_logprobs is None:
            return None
        return self._finish(request, reason, None, outcome) if reason else self._event(request, outcome)

    def _finish_reason(self, request: Request, row: PlannedRow) -> FinishReason | None:
        outputs = request.output_token_ids
        if not row.samples:
            return FinishReason.LENGTH if row.kv_length >= row.num_prompt_tokens and not request.max_new_tokens else None
        if outputs[-1] in request.stop_token_ids and len(outputs) >= request.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(outputs) >= request.max_new_tokens else None

    def _register_pages(self, request: Request, num_tokens: int) -> None:
        """Index the pages that are full now that positions below `num_tokens` are computed and known."""
        if not self.config.enable_prefix_reuse:
            return
        full = num_tokens // self.config.page_size
        for index in range(request.num_registered_pages, full):
            self._admission.extend_digests(request, index + 1)
            self.pages.register(request.page_ids[index], request.page_digests[index])
        request.num_registered_pages = max(request.num_registered_pages, full)

    def _event(self, request: Request, outcome: RowResult, reason: FinishReason | None = None) -> Event:
        return Event(
            request_id=request.request_id,
            token_id=outcome.token_id,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            error=outcome.error,
        )

    def _finish(
        self, request: Request, reason: FinishReason, error: str | None = None, outcome: RowResult | None = None
    ) -> Event:
        """End a request: out of the queue or off its slot, pages released."""
        if not self._waiting.remove(request.request_id):
            self._leave_running(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_pending_tokens = 0
        del self._requests[request.request_id]
        return self._event(request, outcome or RowResult(None, error=error), reason)

    def _put_back(self, victim: Request) -> None:
        """Preempt: forget what is computed, keep what was said, and wait again. Results in flight become stale."""
        self._leave_running(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.attempt += 1
        victim.num_preemptions += 1
        victim.num_computed_tokens = 0
        victim.num_pending_tokens = 0
        victim.num_registered_pages = 0
        victim.last_step = 0
        self._num_preemptions += 1
        self._preempted.append(victim.request_id)
        self._waiting.push(victim)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        in_flight = bool(self._in_flight) and request.last_step >= self._in_flight[0].step_id
        self.pages.release(request.page_ids, request.last_step if in_flight else None)
        request.page_ids = []
        request.page_ids_snapshot = ()
        if request.slot is not None:
            self._admission.free_slots.append(request.slot)
            request.slot = None

    # -- looking ------------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """A snapshot for metrics; cheap."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            pages_in_use=self.pages.num_in_use,
            num_pages=self.config.num_pages,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._admission.num_queried_tokens,
            prefix_cache_hits=self._admission.num_hit_tokens,
        )

    def check(self) -> None:
        """Raise InvariantError if any bookkeeping is off. Costs a pass over all pages; for tests and idle moments."""
        check_scheduler(self.config, self.pages, self._requests, self._waiting, self._running, self._admission.free_slots)
