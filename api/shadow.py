"""The shadow policy, switched on by the key `scheduler_config.shadow_policy`: a second policy on the live arrivals.

Made by `ServerState` and begun by its `attach`. Requests come from the event loop through followers, steps from the
engine's thread; a thread of its own turns them into what the shadow (`scheduler/shadow.py`) sees, and into metrics.
Nothing that goes wrong there reaches a request.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from api.config import ServerConfig
from api.logs import get_logger
from api.pace import Pace
from api.shadow_metrics import Comparison, ShadowMeter, ShadowNumbers
from model.engine_types import StepRecord
from scheduler import FinishReason, Request, SchedulerConfig
from scheduler.shadow import LearntCost, Shadow

# Events that may wait for the thread, and as many that the shadow's time has not come to yet. Steps only fill half of
# the queue: one that is missed makes the shadow no less right.
QUEUE_SIZE = 16384
POLL_SECS = 0.1
# The shadow's time keeps this far behind the clock, so that everything has come that happened before it.
LAG_SECS = 0.2
MAX_ADVANCES = 1024
CLOSE_SECS = 1.0
# First tokens as near as this are the same.
SAME_SECS = 0.01
SAME_RATIO = 0.1

logger = get_logger("api.shadow")


def make_shadow(config: ServerConfig) -> "LiveShadow | None":
    """The shadow that the configuration asks for, not begun, or None."""
    policy = config.scheduler_config.shadow_policy
    return None if policy is None else LiveShadow(policy)


class ShadowFollower:
    """A `RequestFollower`. Written by the event loop; the shadow's thread reads."""

    __slots__ = ("_put", "first_token_at", "has_ended", "num_tokens", "request")

    def __init__(self, request: Request, put: "Callable[[_Arrived | _Ended], None]"):
        self._put = put
        self.request = request
        self.num_tokens = 0
        self.first_token_at: float | None = None
        self.has_ended = False

    def on_queued(self, now: float) -> None:
        """The engine has taken the request."""
        self._put(_Arrived(self, now))

    def on_tokens(self, count: int, now: float) -> None:
        """`count` more output tokens have come."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.num_tokens += count

    def on_finished(self, reason: FinishReason, now: float) -> None:
        """The request has ended. Later calls do nothing."""
        if not self.has_ended:
            self.has_ended = True
            self._put(_Ended(self, now))


class _Arrived(NamedTuple):
    follower: ShadowFollower
    at: float


class _Ended(NamedTuple):
    follower: ShadowFollower
    at: float


class LiveShadow:
    """The shadow of one server's engine.

    The engine's thread calls `on_step`; the event loop calls `follower` and what that gives. These take about a
    microsecond, wait for nothing and never raise. `close` blocks for at most its timeout.
    """

    def __init__(self, policy: str, queue_size: int = QUEUE_SIZE, clock: Callable[[], float] = time.monotonic):
        self.policy = policy
        self._queue_size = queue_size
        self._clock = clock
        # Appending and popping are atomic: nobody waits for a lock.
        self._queue: deque[StepRecord | _Arrived | _Ended] = deque()
        # A counter for each of the two threads that add to them.
        self._num_dropped_steps = 0
        self._num_dropped_requests = 0
        self._is_on = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._twins: _Twins | None = None

    @property
    def is_on(self) -> bool:
        """Whether it follows: from `begin` until `close`, or until it fails."""
        return self._is_on

    def begin(self, limits: SchedulerConfig, meter: ShadowMeter) -> None:
        """Start the thread. Once, before the first request. `limits`: the live ones with the shadow's policy."""
        self._is_on = True
        self._thread = threading.Thread(target=self._run, args=(limits, meter), name="shadow", daemon=True)
        self._thread.start()
        logger.info("shadow policy", policy=self.policy)

    def on_step(self, record: StepRecord) -> None:
        """The engine's step listener."""
        if not self._is_on:
            return
        if len(self._queue) >= self._queue_size // 2:
            self._num_dropped_steps += 1
        else:
            self._queue.append(record)

    def follower(self, request: Request) -> ShadowFollower:
        """What follows a request that is about to be submitted. If that is refused, the shadow never hears of it."""
        return ShadowFollower(request, self._put)

    def numbers(self) -> ShadowNumbers:
        """A snapshot for metrics. Any thread."""
        twins, num_dropped = self._twins, self._num_dropped_steps + self._num_dropped_requests
        if twins is None:
            return ShadowNumbers(0, 0, num_dropped)
        num_waiting = twins.num_waiting if self._is_on else 0
        return ShadowNumbers(num_waiting, twins.num_preemptions, num_dropped + twins.num_dropped)

    def close(self, timeout_secs: float = CLOSE_SECS) -> None:
        """End the thread. Idempotent."""
        self._is_on = False
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_secs)

    def _put(self, entry: "_Arrived | _Ended") -> None:
        if not self._is_on:
            return
        if len(self._queue) >= self._queue_size:
            self._num_dropped_requests += 1
        else:
            self._queue.append(entry)

    def _run(self, limits: SchedulerConfig, meter: ShadowMeter) -> None:
        """The shadow's thread. Whatever goes wrong in it switches the shadow off and does nothing else."""
        try:
            twins = self._twins = _Twins(limits, meter, Pace(self._closing.is_set))
            num_missed = 0
            while not self._closing.wait(POLL_SECS):
                # Everything that happened by then has been queued, but for what a thread was just about to queue.
                until = self._clock() - LAG_SECS
                if num_missed != self._num_dropped_requests or twins.num_inputs > self._queue_size:
                    num_missed = self._num_dropped_requests
                    twins.start_over(self._clear_queue())
                    logger.warning("the shadow policy has fallen behind and starts over", policy=self.policy)
                for _ in range(len(self._queue)):
                    twins.take(self._queue.popleft())
                twins.advance(until)
        except Exception:
            logger.exception("the shadow policy has failed and is switched off", policy=self.policy)
        finally:
            self._is_on = False
            self._queue.clear()

    def _clear_queue(self) -> int:
        """Forget what waits; how much that was."""
        num_cleared = len(self._queue)
        for _ in range(num_cleared):
            self._queue.popleft()
        return num_cleared


@dataclass(slots=True)
class _Followed:
    """One request as the shadow's thread knows it. `is_settled`: the shadow will say no more of it."""

    follower: ShadowFollower
    predicted_at: float | None = None
    is_settled: bool = False
    has_ended: bool = False
    is_compared: bool = False


class _Twins:
    """Owns the `Shadow` and what is kept of each request; belongs to the shadow's thread, but for reading numbers."""

    def __init__(self, limits: SchedulerConfig, meter: ShadowMeter, give_way: Callable[[], None]):
        self._limits = limits
        self._meter = meter
        self._give_way = give_way
        self._cost = LearntCost()
        self._shadow = Shadow(limits, self._cost)
        self._followed: dict[str, _Followed] = {}
        self._past_preemptions = 0
        self.num_dropped = 0
        self.num_waiting = 0
        self.num_preemptions = 0

    @property
    def num_inputs(self) -> int:
        """What has happened and the shadow has not come to."""
        return self._shadow.num_inputs

    def start_over(self, num_cleared: int) -> None:
        """Forget every request: of some it is not known what became of them. What steps take is still true."""
        self.num_dropped += num_cleared + self._shadow.num_inputs
        self._past_preemptions = self.num_preemptions
        self._shadow = Shadow(self._limits, self._cost)
        self._followed.clear()

    def take(self, entry: StepRecord | _Arrived | _Ended) -> None:
        """One entry of the queue."""
        self._give_way()
        if isinstance(entry, StepRecord):
            self._shadow.observe_step(entry.shape, entry.duration_secs)
            return
        follower, at = entry
        request_id = follower.request.request_id
        if isinstance(entry, _Arrived):
            self._followed[request_id] = _Followed(follower)
            self._shadow.arrive(follower.request, at)
        elif (followed := self._followed.get(request_id)) is not None:
            followed.has_ended = True
            self._shadow.end(request_id, follower.num_tokens, at)
            self._conclude(request_id, followed)

    def advance(self, until: float) -> None:
        """Let the shadow's time go on, and count what it did."""
        for _ in range(MAX_ADVANCES):
            if not self._shadow.advance(until) and not self._tell_progress():
                break
            self._give_way()
        for request_id, first_token_at in self._shadow.take_events():
            followed = self._followed[request_id]
            request = followed.follower.request
            followed.is_settled = True
            followed.predicted_at = first_token_at
            if first_token_at is not None:
                self._meter.on_predicted(request.priority, first_token_at - request.arrival_time)
            self._conclude(request_id, followed)
        self.num_waiting = self._shadow.num_waiting
        self.num_preemptions = self._past_preemptions + self._shadow.num_preemptions

    def _tell_progress(self) -> bool:
        """Whether the shadow waited for live tokens that have come by now."""
        undecided = self._shadow.undecided()
        for request_id in undecided:
            self._shadow.progress(request_id, self._followed[request_id].follower.num_tokens)
        return bool(undecided) and not self._shadow.undecided()

    def _conclude(self, request_id: str, followed: _Followed) -> None:
        """Compare first tokens if both are known, and forget the request if nothing more will come."""
        predicted_at, came_at = followed.predicted_at, followed.follower.first_token_at
        if predicted_at is not None and came_at is not None and not followed.is_compared:
            followed.is_compared = True
            self._meter.on_compared(_compare(predicted_at, came_at, followed.follower.request.arrival_time))
        if followed.is_settled and followed.has_ended:
            del self._followed[request_id]


def _compare(predicted_at: float, came_at: float, arrived_at: float) -> Comparison:
    if abs(predicted_at - came_at) <= max(SAME_SECS, SAME_RATIO * (came_at - arrived_at)):
        return "same"
    return "earlier" if predicted_at < came_at else "later"
