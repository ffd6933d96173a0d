"""The engine loop: plan, run, commit, in a thread of its own. Owns the scheduler and the runner.

`api/` submits requests and gets their events through a sink. The loop keeps one step in flight: while the device runs
step n, step n+1 is planned and handed over, so that the device does not wait for the host. It plans as late as the
expected length of step n allows, so that a request that arrives meanwhile still makes it into step n+1.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from model.engine_types import EngineDeadError, EngineState, EngineStats, StepRecord, step_shape
from model.results import PromptPiece
from model.runner import Runner, StepHandle
from model.step_timer import StepTimer
from scheduler import Scheduler
from scheduler.decisions import Explanation
from scheduler.plan import Event
from scheduler.request import FinishReason, Request

Sink = Callable[[Event], None]

# Under constant load a program that is missing is compiled after this long all the same.
IDLE_WAIT_SECS = 20.0
# Whoever waited for the server to be ready asks at once, and should have the device to itself.
FIRST_REQUEST_SECS = 1.0

logger = logging.getLogger(__name__)


class _Subscriber:
    """Where a live request's events go, and how many prompt logprobs it has had."""

    __slots__ = ("prompt_position", "sink")

    def __init__(self, sink: Sink):
        self.sink = sink
        self.prompt_position = 1


class Engine:
    """One scheduler and one runner, and the thread that turns them.

    Thread safety: every public method may be called from any thread. Sinks are called with the engine's lock held, on
    the engine's thread or on the thread that aborts; they must return at once and must not call the engine back.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        on_step_done: Callable[[], None] = lambda: None,
        before_step: Callable[[], None] = lambda: None,
        on_warm_up: Callable[[int, int], None] = lambda done, total: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`on_step_done` runs on the engine's thread after a step's events; `before_step` may raise."""
        self._scheduler = scheduler
        self._runner = runner
        self._on_step_done = on_step_done
        self._before_step = before_step
        self._on_warm_up = on_warm_up
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._subscribers: dict[str, _Subscriber] = {}
        self._listeners: list[Callable[[StepRecord], None]] = []
        self._state = EngineState.STARTING
        self._error: str | None = None
        self._stopping = False
        self._steps = 0
        self._step_started: float | None = None
        self._timer = StepTimer()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        """Where the engine stands now."""
        return self._state

    @property
    def error(self) -> str | None:
        """Why the engine is dead, if it is."""
        return self._error

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that one request may hold."""
        return self._scheduler.config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids from here on are not tokens."""
        return self._runner.config.vocab_size

    @property
    def kernel_name(self) -> str:
        """The attention implementation in use."""
        return self._runner.kernels.name

    def max_tokens_per_request(self, prompt_length: int) -> int:
        """Output tokens that a prompt of this length leaves room for, in the context and in the pool."""
        return self._scheduler.max_new_tokens_for(prompt_length)

    def start(self) -> None:
        """Start the thread: warm-up, then the loop."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the loop after the step under way; open requests end with an error. Blocks up to `timeout` seconds."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queue requests, all or none.

        Raises:
            EngineDeadError: the engine is not running.
            QueueFullError, NeverFitsError, DuplicateRequestError: from the scheduler; nothing was queued.
        """
        with self._lock:
            if self._state is EngineState.DEAD or self._stopping:
                raise EngineDeadError("the engine is not running")
            self._scheduler.add_requests(requests, self._clock())
            for request in requests:
                self._subscribers[request.request_id] = _Subscriber(sink)
            self._work.notify_all()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in any state. Does nothing if it has ended already."""
        with self._lock:
            event = self._scheduler.abort(request_id, self._clock(), reason)
            if event is not None:
                self._deliver((event,))

    def stats(self) -> EngineStats:
        """A snapshot, consistent in itself."""
        with self._lock:
            return EngineStats(
                scheduler=self._scheduler.stats(),
                state=self._state,
                error=self._error,
                steps=self._steps,
                compilations=self._runner.compilations,
                warm_up_is_complete=self._runner.warm_up_is_complete,
            )

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits or was put back; None if nothing is known of it."""
        with self._lock:
            return self._scheduler.explain(request_id, self._clock())

    def check(self) -> None:
        """Check the scheduler's invariants. Raises InvariantError."""
        with self._lock:
            self._scheduler.check()

    def current_step_seconds(self) -> float:
        """How long the step under way has been running; 0 when none is."""
        started = self._step_started
        return 0.0 if started is None else max(0.0, self._clock() - started)

    def add_step_listener(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` on the engine's thread after every step. A listener that raises is logged and kept."""
        self._listeners.append(listener)

    def _main(self) -> None:
        try:
            self._state = EngineState.WARMING_UP
            self._runner.warm_up(self._on_warm_up)
            self._state = EngineState.READY
            threading.Thread(target=self._warm_up_rest, name="warm-up", daemon=True).start()
            self._loop()
            self._die("the engine was stopped")
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"{type(error).__name__} in the engine")

    def _warm_up_rest(self) -> None:
        """Compile what only saves padding, preferably while nothing runs. A failure costs speed, not answers."""
        try:
            self._await_first_request(FIRST_REQUEST_SECS)
            while not self._stopping and self._runner.compile_next():
                self._await_idleness(IDLE_WAIT_SECS)
        except Exception:
            logger.exception("background compilation failed; steps are padded to the programs that exist")

    def _await_first_request(self, limit: float) -> None:
        """Return once a request has come and gone, or after `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and not self._stopping:
            if self._steps and not self._scheduler.has_work():
                return
            time.sleep(0.05)

    def _await_idleness(self, limit: float) -> None:
        """Return once nothing runs or waits, or after `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self._scheduler.has_work() and not self._stopping:
            time.sleep(0.05)

    def _die(self, reason: str) -> None:
        with self._lock:
            self._state = EngineState.DEAD
            self._error = reason
            self._step_started = None
            self._deliver(self._scheduler.fail_all(reason, self._clock()))
        self._on_step_done()

    def _loop(self) -> None:
        running: StepHandle | None = None
        while not self._stopping:
            if running is not None:
                self._timer.await_planning_time(running)
            following = self._plan_and_dispatch(idle=running is None)
            if running is not None:
                self._finish(running)
            running = following
        if running is not None:
            self._finish(running)

    def _plan_and_dispatch(self, idle: bool) -> StepHandle | None:
        """Dispatch the next step, or return None if there is nothing to run; waits for work when `idle`."""
        with self._lock:
            while idle and not self._stopping and not self._scheduler.has_work():
                self._step_started = None
                self._work.wait()
            if self._stopping:
                return None
            plan = self._scheduler.plan(self._clock(), self._runner.max_step_tokens)
        if not plan.rows:
            return None
        if self._step_started is None:
            self._step_started = self._clock()
        self._before_step()
        return self._runner.dispatch(plan)

    def _finish(self, handle: StepHandle) -> None:
        """Wait for a step, commit it and hand out its events."""
        result = self._runner.collect(handle)
        after_idle = self._timer.was_idle_before(handle)
        duration, finished_at = self._timer.finished(handle)
        with self._lock:
            self._steps += 1
            self._step_started = self._clock() if self._scheduler.num_in_flight > 1 else None
            self._deliver(self._scheduler.commit(handle.plan, result, self._clock()))
        self._on_step_done()
        self._notify_listeners(handle, duration, finished_at, after_idle)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            subscriber = self._subscribers.get(event.request_id)
            if subscriber is None:
                continue
            if event.finish_reason is not None:
                del self._subscribers[event.request_id]
            subscriber.sink(event if event.prompt_logprobs is None else _without_repeats(event, subscriber))

    def _notify_listeners(self, handle: StepHandle, duration: float, finished_at: float, after_idle: bool) -> None:
        if not self._listeners:
            return
        record = StepRecord(
            step_id=handle.plan.step_id,
            shape=step_shape(handle.plan),
            num_padded_tokens=handle.layout.num_tokens,
            num_padded_rows=handle.layout.num_rows,
            duration_secs=duration,
            finished_at=finished_at,
            started_after_idle=after_idle,
        )
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:
                logger.exception("a step listener failed")


def _without_repeats(event: Event, subscriber: _Subscriber) -> Event:
    """A resumed request computes its prompt again; positions that were handed out are cut off."""
    piece = event.prompt_logprobs
    assert isinstance(piece, PromptPiece)
    fresh = piece.entries[max(0, subscriber.prompt_position - piece.start) :]
    subscriber.prompt_position += len(fresh)
    return Event(
        request_id=event.request_id,
        token_id=event.token_id,
        logprobs=event.logprobs,
        prompt_logprobs=fresh or None,
        finish_reason=event.finish_reason,
        num_cached_tokens=event.num_cached_tokens,
        error=event.error,
    )
