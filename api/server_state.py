"""What the routes share: engine, tokenizer, configuration, metrics, and whether the server takes requests.

Built by `api/supervisor.py` before there is a model; `attach` adds the model and its engine once they exist. Everything
here but what says otherwise belongs to the event loop's thread.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from api.call_directory import CallDirectory
from api.config import ServerConfig
from api.followers import Followers, RequestFollower
from api.generation.bridge import EventBridge
from api.logs import RateLimitedWarnings
from api.metrics import Metrics
from api.recording import Recording
from api.shadow import LiveShadow, make_shadow
from model.engine_types import EngineState, EngineStats, StepRecord
from scheduler import Event, FinishReason, Request
from scheduler.decisions import Explanation

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_SECS = 30.0


class RequestEngine(Protocol):
    """What takes requests. Every method may be called from any thread and returns at once."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that one request may hold."""

    @property
    def vocab_size(self) -> int:
        """Ids from here on are not tokens."""

    def submit(self, requests: Sequence[Request], sink: Callable[[Event], None]) -> None:
        """Queue requests, all or none. Raises EngineDeadError or the scheduler's errors."""

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in any state; nothing if it has ended."""

    def max_tokens_per_request(self, prompt_length: int) -> int:
        """Room for output, in the context and in the pool; not positive if there is none."""


class EngineMonitor(Protocol):
    """What tells of the engine's health. Every method may be called from any thread and returns at once."""

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""

    def stats(self) -> EngineStats:
        """A snapshot of numbers."""

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits or was put back; None if nothing is known of it."""

    def current_step_seconds(self) -> float:
        """How long the step under way has been running; 0 when none is."""

    def add_step_listener(self, listener: Callable[[StepRecord], None]) -> None:
        """Have `listener` called on the engine's thread after every step."""

    def stop(self, timeout: float = 5.0) -> None:
        """End the loop; open requests end with an error. Blocks up to `timeout` seconds, unlike the rest."""


class ServingEngine(RequestEngine, EngineMonitor, Protocol):
    """`model.engine.Engine`, as far as the API uses it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this server that are not a wire format's own.

    Attributes:
        max_body_bytes: a longer request body is 413. body_timeout_secs: a body that takes longer is 408.
        request_timeout_secs: how long a request may take from its arrival to its last token.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_secs: float = BODY_TIMEOUT_SECS
    request_timeout_secs: float = 180.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `/server_info` tells of the model and the device. `details` holds plain JSON values, by section."""

    name: str
    device: str
    details: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class ServerState:
    """One server. Owns the flag `draining` and the count of open requests; the rest it only holds.

    Attributes:
        config, limits, metrics: as configured. bridge: takes the engine's events to the event loop.
        recording: takes the run down, or None.
        shadow: runs a second policy without effect, or None. warnings: for warnings that a client can provoke at will.
        calls: which engine requests belong to the ids that clients see.
        model_name, model_names: what `model` in a request may be; empty until `attach`.
        num_open_requests: HTTP requests on routes that generate, begun and not ended.
        draining: set once, when the server stops taking requests.
        created: seconds since the epoch. started_at: seconds of `time.monotonic`.
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics | None = None,
        limits: Limits | None = None,
        recording: Recording | None = None,
    ):
        self.config = config
        self.recording = recording
        self.shadow: LiveShadow | None = make_shadow(config)
        self.limits = limits or Limits(request_timeout_secs=config.request_timeout_secs)
        self.metrics = metrics or Metrics()
        self.bridge = EventBridge()
        self.warnings = RateLimitedWarnings()
        self.calls = CallDirectory()
        self.model_name = ""
        self.model_names: tuple[str, ...] = ()
        self.facts = ModelFacts("", "")
        self.draining = False
        self.created = int(time.time())
        self.started_at = time.monotonic()
        self._engine: ServingEngine | None = None
        self._tokenizer: Tokenizer | None = None
        self.num_open_requests = 0

    @property
    def engine(self) -> ServingEngine:
        """The engine. Raises LookupError before `attach`; the edge refuses generation requests until then."""
        if self._engine is None:
            raise LookupError("there is no engine yet")
        return self._engine

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer. Raises LookupError before `attach`."""
        if self._tokenizer is None:
            raise LookupError("there is no tokenizer yet")
        return self._tokenizer

    @property
    def is_attached(self) -> bool:
        """Whether there is an engine and a tokenizer."""
        return self._engine is not None

    def attach(self, engine: ServingEngine, tokenizer: "Tokenizer", facts: ModelFacts) -> None:
        """Give the server its model. `facts.name` is what it is called unless the configuration says otherwise.

        Raises:
            ConfigError: the recording cannot be begun.
        """
        if self.recording is not None:
            model_name = self.config.served_model_name or facts.name
            self.recording.begin(model_name, facts.device, engine.stats().scheduler.num_pages)
            engine.add_step_listener(self.recording.on_step)
        self.model_name = self.config.served_model_name or facts.name
        self.model_names = (self.model_name,)
        self.facts = facts
        self._tokenizer = tokenizer
        self._engine = engine
        self.metrics.bind(self.model_name, engine.stats)
        engine.add_step_listener(self.metrics.on_step)
        if self.shadow is not None:
            limits = self.config.scheduler_limits(engine.stats().scheduler.num_pages)
            numbers = self.metrics.bind_shadow(self.shadow.policy, self.shadow.numbers)
            self.shadow.begin(self.config.scheduler_config.shadow_limits(limits), numbers)
            engine.add_step_listener(self.shadow.on_step)

    def follow(self, request: Request) -> RequestFollower:
        """What follows a request that is about to be submitted."""
        followers = [self.metrics.meter(request)]
        if self.recording is not None:
            followers.append(self.recording.recorder(request))
        if self.shadow is not None:
            followers.append(self.shadow.follower(request))
        return Followers(followers) if len(followers) > 1 else followers[0]

    def close(self) -> None:
        """End what ran beside the engine, once that has been stopped. Blocks for some seconds at most; idempotent."""
        if self.shadow is not None:
            self.shadow.close()
        if self.recording is not None:
            self.recording.close()

    def not_ready_reason(self) -> str | None:
        """Why `/ready` is 503 now, or None. Any thread."""
        if self.draining:
            return "the server is shutting down"
        if self._engine is None:
            return "the model is being loaded"
        state = self._engine.state
        if state is EngineState.DEAD:
            return "the engine has stopped"
        if state is not EngineState.READY:
            return "the server is warming up"
        if self._engine.current_step_seconds() > self.config.engine_stall_secs:
            return "the engine has stalled"
        return None

    def is_ready(self) -> bool:
        """Whether the server would answer a generation request soon. Any thread."""
        return self.not_ready_reason() is None

    def refusal_reason(self) -> str | None:
        """Why a generation request is refused now, or None. A stalled engine still queues."""
        if self.draining or self._engine is None or self._engine.state is not EngineState.READY:
            return self.not_ready_reason()
        return None

    def begin_drain(self) -> None:
        """Stop taking requests; those that are open go on."""
        self.draining = True

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count one HTTP request as open for as long as the block runs; a drain waits for it."""
        self.num_open_requests += 1
        try:
            yield
        finally:
            self.num_open_requests -= 1
