"""The scheduler: who runs in the next step, on which pages, and what a step's results mean. Pure: time is passed in.

Called by `model/engine.py` and by simulations: `plan`, then run the plan somewhere, then `commit`. There is no prefill
or decode phase: every request has computed tokens that chase its known tokens, and a step hands out a token budget.
A plan may be made while the one before it still runs; a token that is being drawn is then *pending*.
"""

from collections import deque
from collections.abc import Sequence
from math import isfinite

from scheduler.admission import Admission
from scheduler.config import SchedulerConfig
from scheduler.decisions import NUM_AHEAD, Decision, DecisionKind, DecisionLog, Explanation, explain_ended, summarise
from scheduler.errors import DuplicateRequestError, InvariantError, NeverFitsError, QueueFullError
from scheduler.invariants import check_scheduler
from scheduler.pages import PagePool
from scheduler.plan import Event, PlannedRow, RowResult, SchedulerStats, StepPlan, StepResult
from scheduler.policies import make_policy
from scheduler.policies.base import Policy
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.rows import build_rows
from scheduler.running import RunningSet

# Half the time of calling the class.
_new_tuple = tuple.__new__


class Scheduler:
    """Every decision about requests and pages. Not thread-safe; nothing here blocks.

    All methods but `stats`, `check`, `has_work`, `get` and `max_new_tokens_for` mutate.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None, log: DecisionLog | None = None):
        """`policy`: one made by hand and used by nobody else; by default the one that the configuration names.

        With a `log`, decisions are kept there and `explain` answers.
        """
        self.config = config
        self.policy = policy or make_policy(config)
        self.pages = PagePool(config.num_pages, config.page_size, config.enable_prefix_reuse)
        self._charge = self.policy.charge
        self._waiting = self.policy.order.make_queue()
        self._running = RunningSet(config, self.pages, self.policy, self._waiting, log)
        self._admission = Admission(config, self.pages, self.policy, self._waiting, self._running, log)
        self._log = log
        self.policy.order.attach(self._admission.num_cached_tokens)
        self._requests: dict[str, Request] = {}
        # With each plan the requests of its rows: an id may be given to another request meanwhile.
        self._in_flight: deque[tuple[StepPlan, tuple[Request, ...]]] = deque()
        self._step_id = 0
        self._sequence = 0

    # -- requests in and out ------------------------------------------------------------------------------------------

    def max_new_tokens_for(self, prompt_length: int) -> int:
        """Output tokens that a prompt leaves room for, in the context and in the pool; negative if it does not fit.

        The KV of the last token drawn is never needed, so the pool must hold one token less than the context.
        """
        pool_room = self.config.num_pages * self.config.page_size - prompt_length
        return min(self.config.max_model_len - prompt_length, pool_room + 1 if pool_room >= 0 else pool_room)

    def add_request(self, request: Request, now: float) -> None:
        """Queue one request; see `add_requests`."""
        self.add_requests((request,), now)

    def add_requests(self, requests: Sequence[Request], now: float) -> None:
        """Queue requests in this order, all or none.

        Raises:
            QueueFullError: they would leave more than `max_queue_size` waiting beyond the free slots.
            NeverFitsError: one could not fit the context or the pool even alone.
            DuplicateRequestError: an id is live already, or given twice, or a `Request` object was added before.
            ValueError: a priority is not finite, or `max_new_tokens` is negative.
        """
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or any(request_id in self._requests for request_id in ids):
            raise DuplicateRequestError("a request id is already in use")
        for request in requests:
            self._check_values(request)
            self._check_fits(request)
        free_slots = len(self._running.free_slots)
        if len(self._waiting) + len(requests) > self.config.max_queue_size + free_slots:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting; the queue holds {self.config.max_queue_size}"
            )
        for request in requests:
            self._sequence += 1
            request.sequence = self._sequence
            request.queued_at = now
            request.prompt_token_ids = tuple(request.prompt_token_ids)
            self._requests[request.request_id] = request
            if self._charge is not None:
                self._charge.on_arrival(request, now)
            if self._log is not None:
                reason = f"{request.num_prompt_tokens} prompt tokens, {len(self._waiting)} waiting before it came"
                self._log.record(request.request_id, Decision(now, DecisionKind.QUEUED, reason))
            self._waiting.push(request)

    def _check_values(self, request: Request) -> None:
        if request.sequence:
            raise DuplicateRequestError("a Request object is used once; build another")
        if not isfinite(request.priority):
            raise ValueError(f"priority must be finite, not {request.priority}")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, not {request.max_new_tokens}")

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
        if request.max_new_tokens > self.max_new_tokens_for(length):
            raise NeverFitsError(
                f"{length} prompt tokens and {request.max_new_tokens} new ones exceed the KV pool of "
                f"{pool_tokens} tokens"
            )

    def get(self, request_id: str) -> Request | None:
        """The live request with this id, for reading."""
        return self._requests.get(request_id)

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> Event | None:
        """End a request in any state; its pages are free at once, but for those that a step in flight may touch.

        Returns its last event, or None if no such request is live.
        """
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason, now)

    def fail_all(self, error: str, now: float) -> tuple[Event, ...]:
        """End every request with an error, and forget the steps in flight: the device is gone."""
        events = tuple(
            self._finish(request, FinishReason.ERROR, now, error) for request in list(self._requests.values())
        )
        while self._in_flight:
            self.pages.end_quarantine(self._in_flight.popleft()[0].step_id)
        return events

    # -- planning -----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a request is live: `plan` finds something to run now, or once the steps in flight are committed."""
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Plans that are not committed yet."""
        return len(self._in_flight)

    def plan(self, now: float, max_tokens: int | None = None) -> StepPlan:
        """Decide the next step. A plan with rows must be committed before the next but one is made.

        `max_tokens` lowers `max_num_batched_tokens` for this step, down to the slots at least: for a device that cannot
        run the largest step yet.

        Raises:
            InvariantError: two plans are in flight already.
            ValueError: `max_tokens` is less than the requests that may run, each of which gets a token in every step.
        """
        budget = self.config.max_num_batched_tokens if max_tokens is None else max_tokens
        if budget < self._running.max_size:
            raise ValueError(f"max_tokens must be at least {self._running.max_size}, not {max_tokens}")
        budget = min(budget, self.config.max_num_batched_tokens)
        if len(self._in_flight) > 1:
            raise InvariantError("two plans are in flight; commit the older one first")
        self._running.preempted = []
        self._running.reserve_growth(now)
        if not self._running.preempted:
            self._admission.admit(now, budget)
        step_id = self._step_id + 1
        rows = build_rows(self._running, self.policy.eviction, budget, step_id, self.config.page_size)
        plan = StepPlan(step_id, rows, tuple(self._running.preempted))
        if rows:
            self._step_id = step_id
            self._in_flight.append((plan, tuple([self._requests[row.request_id] for row in rows])))
        return plan

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> tuple[Event, ...]:
        """Take in the results of the oldest plan in flight. Rows of requests that ended or were put back are dropped.

        Raises:
            InvariantError: the plan is not the oldest in flight, or the result does not belong to it.
        """
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise InvariantError("plans are committed in the order in which they were made")
        if result.step_id != plan.step_id or len(result.rows) != len(plan.rows):
            raise InvariantError("the result does not belong to the plan")
        _, requests = self._in_flight.popleft()
        self.pages.end_quarantine(plan.step_id)
        charge = self._charge
        events: list[Event] = []
        for request, row, outcome in zip(requests, plan.rows, result.rows, strict=True):
            if request.attempt != row.attempt:
                continue
            token_id, logprobs, prompt_logprobs, error = outcome
            if charge is not None and error is None:
                charge.on_computed(request, len(row.token_ids), row.samples)
            outputs = request.output_token_ids
            num_outputs = len(outputs)
            # Most rows draw a token that neither ends the request nor fills a page; these lines are for them.
            if (
                token_id is not None
                and error is None
                and num_outputs + 1 < request.max_new_tokens
                and token_id not in request.stop_token_ids
                and row.num_prompt_tokens + num_outputs < request.next_registration
                and row.samples
            ):
                request.num_pending_tokens -= 1
                outputs.append(token_id)
                cached = request.num_cached_tokens
                values = (request.request_id, token_id, logprobs, prompt_logprobs, None, cached, None)
                events.append(_new_tuple(Event, values))
                continue
            event = self._commit_row(request, row, outcome, now)
            if event is not None:
                events.append(event)
        return tuple(events)

    def _commit_row(self, request: Request, row: PlannedRow, outcome: RowResult, now: float) -> Event | None:
        if outcome.error is not None:
            return self._finish(request, FinishReason.ERROR, now, outcome.error)
        if row.samples:
            if outcome.token_id is None:
                raise InvariantError(f"a row of {row.request_id} should have drawn a token")
            request.num_pending_tokens -= 1
            request.output_token_ids.append(outcome.token_id)
        num_full_pages = (row.token_start + len(row.token_ids)) // self.config.page_size
        if num_full_pages > request.num_registered_pages and self.config.enable_prefix_reuse:
            self._register_pages(request, num_full_pages)
        reason = self._finish_reason(request, row)
        if reason is None and not row.samples and outcome.prompt_logprobs is None:
            return None
        return self._finish(request, reason, now, None, outcome) if reason else self._event(request, outcome)

    def _finish_reason(self, request: Request, row: PlannedRow) -> FinishReason | None:
        outputs = request.output_token_ids
        if not row.samples:
            return (
                FinishReason.LENGTH if row.kv_length >= row.num_prompt_tokens and not request.max_new_tokens else None
            )
        if outputs[-1] in request.stop_token_ids and len(outputs) >= request.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(outputs) >= request.max_new_tokens else None

    def _register_pages(self, request: Request, num_full_pages: int) -> None:
        """Index the pages that are full of tokens that are computed and known."""
        self._admission.extend_digests(request, num_full_pages)
        for index in range(request.num_registered_pages, num_full_pages):
            self.pages.register(request.page_ids[index], request.page_digests[index])
        request.num_registered_pages = num_full_pages
        request.next_registration = (num_full_pages + 1) * self.config.page_size

    def _event(self, request: Request, outcome: RowResult, reason: FinishReason | None = None) -> Event:
        return Event(
            request.request_id,
            outcome.token_id,
            outcome.logprobs,
            outcome.prompt_logprobs,
            reason,
            request.num_cached_tokens,
            outcome.error,
        )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        error: str | None = None,
        outcome: RowResult | None = None,
    ) -> Event:
        """End a request: out of the queue or off its slot, pages released."""
        if self._log is not None:
            self._log.record(request.request_id, Decision(now, DecisionKind.ENDED, reason.value))
        request.finish_reason = reason
        if self._charge is not None:
            self._charge.on_end(request)
        if not self._waiting.remove(request.request_id):
            self._running.leave(request)
        request.status = RequestStatus.FINISHED
        request.attempt += 1
        request.num_pending_tokens = 0
        del self._requests[request.request_id]
        return self._event(request, outcome or RowResult(None, error=error), reason)

    # -- looking ------------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """A snapshot for metrics; cheap."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            pages_in_use=self.pages.num_in_use,
            num_pages=self.config.num_pages,
            num_preemptions=self._running.num_preemptions,
            prefix_cache_queries=self._admission.num_queried_tokens,
            prefix_cache_hits=self._admission.num_hit_tokens,
        )

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Why a request waits or was put back; None if nothing is known of it, or no log is kept.

        Sorts the queue, so it takes milliseconds when thousands wait.
        """
        if self._log is None:
            return None
        decisions = self._log.decisions(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return explain_ended(request_id, decisions) if decisions else None
        waits = request_id in self._waiting
        order = [waiting.request_id for waiting in self._waiting] if waits else []
        ahead = order.index(request_id) if waits else 0
        obstacle = self._admission.obstacle
        waited = (now - request.queued_at) if waits else request.admitted_at - request.queued_at
        return Explanation(
            request_id=request_id,
            status=request.status.name.lower(),
            summary=summarise(request, ahead, obstacle, decisions[-1] if decisions else None),
            priority=request.priority,
            waited_secs=waited,
            position=ahead + 1 if waits else None,
            num_waiting=len(self._waiting),
            ahead=tuple(order[: min(ahead, NUM_AHEAD)]),
            obstacle=obstacle.reason if obstacle is not None and waits else None,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_pages=len(request.page_ids),
            num_preemptions=request.num_preemptions,
            decisions=decisions,
        )

    def check(self) -> None:
        """Raise InvariantError if any bookkeeping is off. Costs a pass over all pages; for tests and idle moments."""
        check_scheduler(self.config, self.pages, self._requests, self._waiting, self._running)
