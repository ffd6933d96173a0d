"""All choices of one call to the API: submitted together, fed by the engine's events, ended together.

Made by `service.py` for each request to a completion route. Everything here runs on the event loop; events are handled
as they come, whether or not the client reads, so that a slow reader holds up neither its own stop strings nor the
metrics: what it has not read yet simply grows together into one larger delta.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from api.followers import RequestFollower
from api.generation.bridge import EventBridge
from api.generation.choice import ChoiceRules, ChoiceStream
from api.generation.detokenize import TokenTables
from api.metrics import Metrics
from api.protocol.errors import ApiError, InternalError, RequestTimeoutError, UnavailableError
from api.server_state import RequestEngine
from scheduler import Event, FinishReason, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """One engine request, and how its tokens become an answer."""

    request: Request
    rules: ChoiceRules


class Choice:
    """A choice of a call: its stream, and what is kept about it."""

    __slots__ = ("follower", "index", "is_due", "num_prompt_tokens", "prompt_index", "request_id", "stream")

    def __init__(self, planned: PlannedChoice, tables: TokenTables, follower: RequestFollower):
        self.request_id = planned.request.request_id
        self.index = planned.rules.index
        self.prompt_index = planned.rules.prompt_index
        self.num_prompt_tokens = planned.request.num_prompt_tokens
        self.stream = ChoiceStream(planned.rules, tables)
        self.follower = follower
        self.is_due = False


class GenerationCall:
    """Owns the engine requests of one call from `submit` to `close`.

    Attributes, for reading:
        choices: in the order of their index.
        failure: why the call as a whole has failed; its requests are aborted then.
        first_token_at: of whichever choice, in seconds of `time.monotonic`.
        is_closed: whether `close` was called.
    """

    def __init__(
        self,
        planned: Sequence[PlannedChoice],
        *,
        engine: RequestEngine,
        bridge: EventBridge,
        metrics: Metrics,
        tables: TokenTables,
        interval: int | None,
        follow: Callable[[Request], RequestFollower] | None = None,
    ):
        """
        Args:
            interval: a choice is due after so many tokens (and its first); None when only the whole answer counts.
            follow: makes what follows each request; by default its meter.
        """
        follow = follow or metrics.meter
        self.failure: ApiError | None = None
        self.choices = [Choice(choice, tables, follow(choice.request)) for choice in planned]
        self._requests = [choice.request for choice in planned]
        self._engine = engine
        self._metrics = metrics
        self._interval = interval
        self._mailbox = bridge.open_mailbox(self._receive)
        self._live: dict[str, Choice] = {}
        self._due: list[Choice] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.first_token_at: float | None = None
        self.is_closed = False

    def submit(self, timeout_secs: float) -> None:
        """Hand the requests to the engine, all or none; `timeout_secs` later the call fails unless it is over.

        Raises what `RequestEngine.submit` raises; nothing was submitted then.
        """
        self._engine.submit(self._requests, self._mailbox.put)
        now = time.monotonic()
        for choice in self.choices:
            choice.follower.on_queued(now)
        self._live = {choice.request_id: choice for choice in self.choices}
        prompts = {choice.prompt_index: request for choice, request in zip(self.choices, self._requests, strict=True)}
        num_prompt_tokens = sum(request.num_prompt_tokens for request in prompts.values())
        self._metrics.on_received(len(self._requests), num_prompt_tokens)
        self._timer = asyncio.get_running_loop().call_later(timeout_secs, self._time_out)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come. `take_due` may still have something."""
        return not self._live or self.failure is not None

    async def wait(self) -> None:
        """Until a choice is due or the call is over. One waiter at a time."""
        if self._due or self.is_over:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def wait_until_over(self) -> None:
        """Until every choice has ended. Raises `failure` if there is one."""
        while not self.is_over:
            await self.wait()
            self.take_due()
        if self.failure is not None:
            raise self.failure

    def take_due(self) -> list[Choice]:
        """The choices that have something to be sent, in the order in which it came."""
        due, self._due = self._due, []
        for choice in due:
            choice.is_due = False
        return due

    def close(self) -> None:
        """End what still runs: the client is gone or has its answer. Idempotent; metrics still see the last events."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._abort_rest()

    def _abort_rest(self) -> None:
        for request_id in list(self._live):
            self._engine.abort(request_id)

    def _time_out(self) -> None:
        if not self.is_over:
            self._fail(RequestTimeoutError("The answer took longer than this server allows.", code="request_timeout"))
            self._wake()

    def _fail(self, failure: ApiError) -> None:
        if self.failure is None and not self.is_closed:
            self.failure = failure
            self._abort_rest()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._due or self.is_over):
            waiter.set_result(None)

    def _receive(self, events: deque[Event], now: float) -> None:
        """The mailbox's receiver."""
        while events:
            event = events.popleft()
            try:
                self._handle(event, now)
            except Exception:
                logger.exception("an answer could not be put together")
                self._give_up(event, now)
        self._wake()

    def _give_up(self, event: Event, now: float) -> None:
        """A bug has met this event: the call fails, and a request that ended with it is still counted."""
        if event.finish_reason is not None and (choice := self._live.pop(event.request_id, None)) is not None:
            choice.follower.on_finished(FinishReason.ERROR, now)
        self._fail(InternalError("The answer could not be put together.", code="internal_error"))

    def _handle(self, event: Event, now: float) -> None:
        choice = self._live.get(event.request_id)
        if choice is None:
            return
        stream = choice.stream
        stream.push(event)
        if event.token_id is not None:
            if self.first_token_at is None:
                self.first_token_at = now
            choice.follower.on_tokens(1, now)
        reason = stream.finish_reason
        if reason is not None:
            self._end(choice, event, reason, now)
        elif choice.is_due or self._interval is None or not stream.has_news:
            return
        elif stream.num_unsent_tokens >= self._interval or stream.num_unsent_tokens == stream.num_tokens:
            choice.is_due = True
            self._due.append(choice)

    def _end(self, choice: Choice, event: Event, reason: FinishReason, now: float) -> None:
        del self._live[choice.request_id]
        choice.follower.on_finished(reason, now)
        if reason is FinishReason.ERROR:
            self._fail(InternalError(f"The answer was broken off: {choice.stream.error}.", code="generation_failed"))
        elif reason is FinishReason.ABORT:
            self._fail(UnavailableError("The server has ended this request.", code="aborted"))
        else:
            if event.finish_reason is None:
                self._engine.abort(choice.request_id, FinishReason.STOP)
            if not choice.is_due:
                choice.is_due = True
                self._due.append(choice)
