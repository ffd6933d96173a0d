"""A second policy on live arrivals, without effect: what it would have done, and the TTFT that it would have given.

The server (`api/shadow.py`) feeds it what happens: arrivals, the shapes and times of real steps, ends. It runs a
simulated engine of its own (`scheduler/simulation/replica.py`) in virtual time that follows the clock of the events,
with step times learnt from the real steps. Pure: no clock, no threads.

How long a request will be is not known before the real one ends; until then the shadow lets it run on, up to its bound.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.errors import NeverFitsError, QueueFullError
from scheduler.request import Request
from scheduler.simulation.records import StepShape
from scheduler.simulation.replica import Replica


class LearntCost:
    """Step times as they were observed lately, by rough size; a `CostModel` that improves while it is used."""

    def __init__(self, weight: float = 0.05, guess_secs: float = 0.05):
        self._weight = weight
        self._guess_secs = guess_secs
        self._means: dict[tuple[int, int, bool], float] = {}

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take one real step into the moving mean of its kind."""
        kind = _kind(shape)
        self._means[kind] = self._means.get(kind, seconds) * (1 - self._weight) + seconds * self._weight

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
    """Something that the shadow did to a request: gave it its first token at `first_token_at`, seconds."""

    request_id: str
    first_token_at: float


class Shadow:
    """The shadow of one scheduler. Not thread-safe; `now` never goes back. Every method mutates; none blocks."""

    def __init__(self, config: SchedulerConfig):
        """`config`: the live one with the shadow's policy. Raises ConfigError for an unknown policy."""
        self._cost = LearntCost()
        self._replica = Replica("shadow", config, self._cost)
        self._ends_at: float | None = None
        self._awaited: set[str] = set()
        self._events: list[ShadowEvent] = []

    @property
    def num_preemptions(self) -> int:
        """How often the shadow has put a request back."""
        return self._replica.scheduler.stats().num_preemptions

    @property
    def num_waiting(self) -> int:
        """How many wait in the shadow."""
        return self._replica.scheduler.stats().num_waiting

    def arrive(self, request: Request, now: float) -> bool:
        """A live request was queued; its twin is queued here. False if the shadow's queue is full."""
        self._advance(now)
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
        try:
            self._replica.add(twin, max(request.max_new_tokens, 1), now)
        except (QueueFullError, NeverFitsError):
            return False
        self._awaited.add(request.request_id)
        self._schedule(self._replica.wake(now))
        return True

    def observe_step(self, shape: StepShape, seconds: float, now: float) -> None:
        """A real step has ended."""
        self._cost.observe(shape, seconds)
        self._advance(now)

    def end(self, request_id: str, num_output_tokens: int, now: float) -> None:
        """The live request has ended after so many tokens; so will its twin, now if it has drawn as many."""
        self._advance(now)
        if num_output_tokens < 1:
            self._replica.abort(request_id, now)
            self._awaited.discard(request_id)
        else:
            self._replica.shorten(request_id, num_output_tokens)
        self._schedule(self._replica.wake(now))

    def take_events(self) -> Sequence[ShadowEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def _schedule(self, ends_at: float | None) -> None:
        if ends_at is not None:
            self._ends_at = ends_at

    def _advance(self, now: float) -> None:
        while self._ends_at is not None and self._ends_at <= now:
            ended_at = self._ends_at
            events, self._ends_at = self._replica.end_step(ended_at)
            for event in events:
                if event.token_id is not None and event.request_id in self._awaited:
                    self._awaited.remove(event.request_id)
                    self._events.append(ShadowEvent(event.request_id, ended_at))


def _kind(shape: StepShape) -> tuple[int, int, bool]:
    return (shape.num_rows.bit_length(), shape.num_tokens.bit_length(), shape.num_prefill_tokens > 0)
