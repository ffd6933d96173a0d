"""An engine without a model, for tests of the API: the real scheduler, and tokens from a script instead of a device.

It has the methods of `model.engine.Engine` that `api/` uses, runs in a thread of its own as that does, and can be told
to pause, to stall or to die. It imports no jax.
"""

import threading
import time
from collections.abc import Callable, Sequence

from model.engine_types import EngineDeadError, EngineState, EngineStats, StepRecord, step_shape
from model.sampling import SamplingParams, TokenLogprobs
from scheduler import FinishReason, Request, Scheduler, SchedulerConfig
from scheduler.decisions import DecisionLog, Explanation
from scheduler.plan import Event, PlannedRow, RowResult, StepPlan, StepResult

Script = Callable[[Request, int], int]
"""(request, index of the output token) → token id."""


def tokens_of(ids: Sequence[int]) -> Script:
    """Every request gets these tokens in turn, over and over."""
    return lambda _request, index: ids[index % len(ids)]


def by_prompt(answers: dict[tuple[int, ...], Sequence[int]]) -> Script:
    """Requests get the tokens listed for their prompt, over and over."""
    return lambda request, index: answers[tuple(request.prompt_token_ids)][
        index % len(answers[tuple(request.prompt_token_ids)])
    ]


SMALL = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_pages=256, page_size=16)


class FakeEngine:
    """Drives a real `Scheduler` with scripted tokens. Thread-safe like the engine it stands for.

    Args:
        script: which token comes next. config: limits and policy of the scheduler.
        vocab_size: what `vocab_size` says. step_secs: how long a step takes.
        on_step_done: called on the engine's thread after the events of a step. before_step: may raise.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        config: SchedulerConfig = SMALL,
        vocab_size: int = 1000,
        step_secs: float = 0.0,
        on_step_done: Callable[[], None] = lambda: None,
        before_step: Callable[[], None] = lambda: None,
    ):
        self.script: Script = script or (lambda request, index: (sum(request.prompt_token_ids) + index) % vocab_size)
        self.scheduler = Scheduler(config, log=DecisionLog())
        self.vocab_size = vocab_size
        self.max_model_len = config.max_model_len
        self.kernel_name = "fake"
        self.step_secs = step_secs
        self.compilations = 3
        self.submitted: list[Request] = []
        self._on_step_done = on_step_done
        self._before_step = before_step
        self._work = threading.Condition(threading.RLock())
        self._sinks: dict[str, Callable[[Event], None]] = {}
        self._listeners: list[Callable[[StepRecord], None]] = []
        self._running = threading.Event()
        self._running.set()
        self._stopping = False
        self._failure: str | None = None
        self._steps = 0
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._main, name="fake-engine", daemon=True)
        self.state = EngineState.STARTING
        self.error: str | None = None

    # -- the engine's interface ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ready at once."""
        self.state = EngineState.READY
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; open requests end with an error."""
        with self._work:
            self._stopping = True
            self._running.set()
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def submit(self, requests: Sequence[Request], sink: Callable[[Event], None]) -> None:
        """Queue requests, all or none. Raises what the scheduler raises, or EngineDeadError."""
        with self._work:
            if self.state is EngineState.DEAD or self._stopping:
                raise EngineDeadError("the engine is not running")
            self.scheduler.add_requests(requests, time.monotonic())
            self.submitted.extend(requests)
            for request in requests:
                self._sinks[request.request_id] = sink
            self._work.notify_all()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in any state; nothing if it has ended."""
        with self._work:
            event = self.scheduler.abort(request_id, time.monotonic(), reason)
            if event is not None:
                self._deliver((event,))

    def max_tokens_per_request(self, prompt_length: int) -> int:
        """Room for output, in the context and in the pool."""
        return self.scheduler.max_new_tokens_for(prompt_length)

    def stats(self) -> EngineStats:
        """A snapshot."""
        with self._work:
            return EngineStats(
                scheduler=self.scheduler.stats(),
                state=self.state,
                error=self.error,
                steps=self._steps,
                compilations=self.compilations,
                warm_up_is_complete=True,
            )

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits."""
        with self._work:
            return self.scheduler.explain(request_id, time.monotonic())

    def check(self) -> None:
        """Check the scheduler's invariants."""
        with self._work:
            self.scheduler.check()

    def current_step_seconds(self) -> float:
        """How long the step under way has been running; 0 when none is."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def add_step_listener(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` after every step."""
        self._listeners.append(listener)

    # -- what tests do to it -------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Take no step until `resume`: requests stay where they are, and a step begun then counts as stalled."""
        self._running.clear()

    def resume(self) -> None:
        """Go on."""
        self._running.set()

    def die(self, reason: str = "RuntimeError in the engine") -> None:
        """Fail as a crashed engine does: every open request ends with an error."""
        with self._work:
            self._failure = reason
            self._running.set()
            self._work.notify_all()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._turn():
                pass
        except Exception as error:
            reason = f"{type(error).__name__} in the engine"
        with self._work:
            self.state = EngineState.DEAD
            self.error = self._failure or reason
            self._step_started = None
            self._deliver(self.scheduler.fail_all(self.error, time.monotonic()))
        self._on_step_done()

    def _turn(self) -> bool:
        with self._work:
            while not (self._stopping or self._failure or self.scheduler.has_work()):
                self._work.wait()
        self._step_started = time.monotonic()
        self._running.wait()
        if self._stopping or self._failure:
            return False
        self._before_step()
        with self._work:
            plan = self.scheduler.plan(time.monotonic())
        if plan.rows:
            self._run(plan)
        self._step_started = None
        return True

    def _run(self, plan: StepPlan) -> None:
        started_at = time.monotonic()
        if self.step_secs:
            time.sleep(self.step_secs)
        with self._work:
            result = StepResult(plan.step_id, tuple(self._result(row) for row in plan.rows))
            self._steps += 1
            self._deliver(self.scheduler.commit(plan, result, time.monotonic()))
        self._on_step_done()
        finished_at = time.monotonic()
        record = StepRecord(
            step_id=plan.step_id,
            shape=step_shape(plan),
            num_padded_tokens=plan.num_tokens,
            num_padded_rows=len(plan.rows),
            duration_secs=finished_at - started_at,
            finished_at=finished_at,
        )
        for listener in self._listeners:
            listener(record)

    def _result(self, row: PlannedRow) -> RowResult:
        request = self.scheduler.get(row.request_id)
        if request is None:
            return RowResult(0 if row.samples else None)
        sampling = row.sampling if isinstance(row.sampling, SamplingParams) else SamplingParams()
        token = self.script(request, row.num_output_tokens) if row.samples else None
        logprobs = None
        if token is not None and sampling.logprobs is not None:
            logprobs = self._logprobs(token, sampling.logprobs)
        prompt = None
        if sampling.prompt_logprobs is not None and row.next_token_ids:
            prompt = tuple(self._logprobs(token_id, sampling.prompt_logprobs) for token_id in row.next_token_ids)
        return RowResult(token, logprobs, prompt)

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token itself is the likeliest, its successors follow."""
        top = tuple((token + offset) % self.vocab_size for offset in range(count))
        return TokenLogprobs(token, -0.25, top, tuple(-0.25 - offset for offset in range(count)))

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            sink = self._sinks.get(event.request_id)
            if sink is None:
                continue
            if event.finish_reason is not None:
                del self._sinks[event.request_id]
            sink(event)
