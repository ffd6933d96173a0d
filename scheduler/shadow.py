"""A second policy on live arrivals, without effect: what it would have done, and the TTFT that it would have given.

The server (`api/shadow.py`) feeds it what happens: arrivals, the shapes and times of real steps, tokens, ends. It runs
a simulated engine of its own (`scheduler/simulation/replica.py`) in virtual time that follows the times of the events,
with step times learnt from the real steps. Pure: no clock, no threads.

How long a request will be is known only when the real one ends. Where the shadow is ahead of the real engine, its time
stands still before the first step that depends on a token nobody has seen yet, and goes on when the real one has come
as far. So requests have their real length whatever the order, and the shadow's time is behind by as much as the live
engine takes longer than it for some request.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.errors import DuplicateRequestError, InvariantError, NeverFitsError, QueueFullError
from scheduler.request import Request
from scheduler.simulation.records import StepShape
from scheduler.simulation.replica import Replica

_Kind = tuple[int, int, bool]


class LearntCost:
    """Step times as they were observed lately, by rough size; a `CostModel` that improves while it is used.

    A mean of all observations of a kind at first, a moving one once there are `1 / weight` of them.
    """

    def __init__(self, weight: float = 0.05, guess_secs: float = 0.05):
        self._weight = weight
        self._guess_secs = guess_secs
        self._means: dict[_Kind, float] = {}
        self._counts: dict[_Kind, int] = {}

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take one real step into the mean of its kind."""
        kind = _kind(shape)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        mean = self._means.get(kind, 0.0)
        self._means[kind] = mean + (max(seconds, 1e-6) - mean) * max(self._weight, 1 / count)

    def step_seconds(self, shape: StepShape) -> float:
        """The mean of this kind, else of the kind nearest in tokens, else a guess."""
        kind = _kind(shape)
        if kind in self._means:
            return self._means[kind]
        if not self._means:
            return self._guess_secs
        nearest = min(self._means, key=lambda known: (abs(known[1] - kind[1]), abs(known[0] - kind[0]), known))
        return self._means[nearest]

    def idle_start_seconds(self) -> float:
        """Hidden in what was observed."""
        return 0.0


class ShadowEvent(NamedTuple):
    """The shadow gave a request its first token at `first_token_at`, seconds; None: there it gets none.

    It gets none when the shadow's queue was full, or when the client left before.
    """

    request_id: str
    first_token_at: float | None


@dataclass(slots=True)
class _Twin:
    """A request that the shadow has not finished. `num_drawn`, `has_ended`: what is known of the real one."""

    max_new_tokens: int
    num_drawn: int = 0
    has_ended: bool = False
    has_token: bool = False

    def may_end_with(self, num_outputs: int) -> bool:
        """Whether nobody knows yet if the real one went on after so many tokens."""
        return not self.has_ended and self.num_drawn <= num_outputs < self.max_new_tokens


class Shadow:
    """The shadow of one scheduler. Not thread-safe; times never go back. No method blocks; all but properties mutate.

    Every request that arrives gets one `ShadowEvent`, once the real one has ended and time has gone on far enough.
    """

    def __init__(self, config: SchedulerConfig, cost: LearntCost | None = None):
        """`config`: the live one with the shadow's policy. Raises ConfigError for an unknown policy."""
        self._cost = cost or LearntCost()
        self._replica = Replica("shadow", config, self._cost)
        self._now = -inf
        self._ends_at: float | None = None
        # What is to happen at a time that the shadow has not reached: an arrival, or a client's leaving.
        self._inputs: deque[tuple[float, Request | str]] = deque()
        self._twins: dict[str, _Twin] = {}
        self._events: list[ShadowEvent] = []

    @property
    def num_preemptions(self) -> int:
        """How often the shadow has put a request back."""
        return self._replica.scheduler.stats().num_preemptions

    @property
    def num_waiting(self) -> int:
        """How many wait in the shadow, at its time."""
        return self._replica.scheduler.stats().num_waiting

    @property
    def num_inputs(self) -> int:
        """What has happened in reality and not yet in the shadow; for its owner to bound."""
        return len(self._inputs)

    def arrive(self, request: Request, now: float) -> None:
        """A live request was queued; its twin will be at this time."""
        twin = Request(
            request.request_id,
            request.prompt_token_ids,
            request.max_new_tokens,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            read_prefix_cache=request.read_prefix_cache,
            tenant=request.tenant,
            predicted_new_tokens=request.predicted_new_tokens,
        )
        if request.request_id in self._twins:
            raise DuplicateRequestError(f"{request.request_id} is in the shadow already")
        self._twins[request.request_id] = _Twin(request.max_new_tokens)
        self._inputs.append((now, twin))

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        """A real step has ended."""
        self._cost.observe(shape, seconds)

    def progress(self, request_id: str, num_output_tokens: int) -> None:
        """The live request has drawn so many tokens. Needs to be told of those in `undecided` only."""
        if (twin := self._twins.get(request_id)) is not None:
            twin.num_drawn = num_output_tokens

    def end(self, request_id: str, num_output_tokens: int, now: float) -> None:
        """The live request has ended after so many tokens, and so will its twin; without any, it leaves now."""
        twin = self._twins.get(request_id)
        if twin is None:
            return
        twin.has_ended = True
        twin.num_drawn = num_output_tokens
        self._replica.shorten(request_id, max(num_output_tokens, 1))
        if num_output_tokens < 1 and twin.max_new_tokens > 0:
            self._inputs.append((now, request_id))

    def advance(self, now: float) -> bool:
        """Let one thing happen that is due by `now`. False: nothing is, or it has to wait for those in `undecided`."""
        next_input_at = self._inputs[0][0] if self._inputs else inf
        if self._ends_at is not None and self._ends_at <= min(now, next_input_at):
            if self.undecided():
                return False
            self._end_step(self._ends_at)
        elif next_input_at <= now:
            self._take_in(*self._inputs.popleft())
        else:
            return False
        return True

    def undecided(self) -> Sequence[str]:
        """Requests of the step under way of which it must be known whether they go on after it."""
        return [
            request_id
            for request_id, num_outputs in self._replica.drawing()
            if (twin := self._twins.get(request_id)) is not None and twin.may_end_with(num_outputs)
        ]

    def take_events(self) -> Sequence[ShadowEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Raise InvariantError if any bookkeeping is off."""
        self._replica.scheduler.check()
        num_coming = sum(isinstance(entry, Request) for _, entry in self._inputs)
        if len(self._twins) != self._replica.num_live + num_coming:
            raise InvariantError("a twin is lost, or kept after its end")

    def _take_in(self, at: float, entry: Request | str) -> None:
        self._now = max(self._now, at)
        request_id = entry if isinstance(entry, str) else entry.request_id
        twin = self._twins.get(request_id)
        if twin is None:
            return
        if isinstance(entry, str):
            self._replica.abort(request_id, self._now)
            self._forget(request_id)
        else:
            length = twin.num_drawn if twin.has_ended else twin.max_new_tokens
            try:
                self._replica.add(entry, max(length, 1), self._now)
            except (QueueFullError, NeverFitsError):
                self._forget(request_id)
        ends_at = self._replica.wake(self._now)
        if ends_at is not None:
            self._ends_at = ends_at

    def _end_step(self, at: float) -> None:
        self._now = max(self._now, at)
        events, self._ends_at = self._replica.end_step(self._now)
        for event in events:
            twin = self._twins.get(event.request_id)
            if twin is not None and event.token_id is not None and not twin.has_token:
                twin.has_token = True
                self._events.append(ShadowEvent(event.request_id, self._now))
            if event.finish_reason is not None:
                self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        twin = self._twins.pop(request_id, None)
        if twin is not None and not twin.has_token:
            self._events.append(ShadowEvent(request_id, None))


def _kind(shape: StepShape) -> _Kind:
    return (shape.num_rows.bit_length(), shape.num_tokens.bit_length(), shape.num_prefill_tokens > 0)
