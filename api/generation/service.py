"""From validated bodies to running calls: what the routes that generate share. Made by `shared_service`, one a server.

It holds what depends on the model (and so exists only once that is loaded): the translator, the tables of token texts.
It maps the errors of admission to HTTP.
"""

import asyncio
from collections.abc import Callable, Sequence

from quart import Quart, request

from api.generation.call import GenerationCall, PlannedChoice
from api.generation.choice import ChoiceRules
from api.generation.detokenize import TokenTables
from api.generation.logprobs import TokenNames
from api.protocol.errors import ApiError, InvalidRequestError, OverloadedError, UnavailableError
from api.server_state import ServerState
from api.translate import DEFAULT_PRIORITY, GenerationTask, Limits, Translator
from model.engine_types import EngineDeadError
from scheduler import NeverFitsError, QueueFullError

RETRY_AFTER_SECS = 1
EXTENSION_KEY = "twinmesh.generation"

# Bodies from this size on are parsed and encoded in a thread, so that the streams of others go on meanwhile.
LARGE_BODY_BYTES = 8192


class GenerationService:
    """What one server's routes need to run calls. Belongs to the event loop."""

    def __init__(self, state: ServerState):
        self.state = state
        self._translator: Translator | None = None
        self._tables: TokenTables | None = None
        self._names: TokenNames | None = None

    @property
    def translator(self) -> Translator:
        """Bodies to tasks. The model must be there, as it is when the edge has let a call pass."""
        if self._translator is None:
            state, config = self.state, self.state.config
            limits = Limits(
                max_model_len=state.engine.max_model_len,
                max_tokens_for=state.engine.max_tokens_per_request,
                model_names=state.model_names,
                service_tiers=config.scheduler_config.service_tiers.model_dump(),
                allow_request_chat_template=config.allow_request_chat_template,
                default_seed=config.seed,
                eos_token_ids=state.tokenizer.eos_token_ids,
            )
            self._translator = Translator(state.tokenizer, limits)
        return self._translator

    @property
    def tables(self) -> TokenTables:
        """The text of every token."""
        if self._tables is None:
            self._tables = TokenTables(self.state.tokenizer)
        return self._tables

    @property
    def names(self) -> TokenNames:
        """How tokens are spelled in lists of alternatives."""
        if self._names is None:
            self._names = TokenNames(self.tables.spelled)
        return self._names

    def start_call(
        self, tasks: Sequence[GenerationTask], rules: Sequence[ChoiceRules], interval: int | None
    ) -> GenerationCall:
        """Submit a call to the engine; it must be closed.

        Raises:
            ApiError: 429 when the queue is full, 400 for a request that could never run, 503 without a live engine.
        """
        state = self.state
        self._warn_of_ineffective_priority(tasks[0].request.priority)
        call = GenerationCall(
            [PlannedChoice(task.request, rule) for task, rule in zip(tasks, rules, strict=True)],
            engine=state.engine,
            bridge=state.bridge,
            metrics=state.metrics,
            tables=self.tables,
            interval=interval,
            follow=state.follow,
        )
        try:
            call.submit(state.limits.request_timeout_secs)
        except (QueueFullError, NeverFitsError, EngineDeadError) as error:
            raise _refusal(error) from error
        return call

    def _warn_of_ineffective_priority(self, priority: float) -> None:
        policy = self.state.config.scheduler_config.waiting_queue_policy
        if policy == "fcfs" and priority != DEFAULT_PRIORITY:
            self.state.warnings.warn(
                "priority_under_fcfs", "a request's priority has no effect under the policy fcfs", priority=priority
            )


def shared_service(app: Quart, state: ServerState) -> GenerationService:
    """The service of the server that `app` belongs to; made when the first route asks for it."""
    service = app.extensions.setdefault(EXTENSION_KEY, GenerationService(state))
    assert isinstance(service, GenerationService)
    return service


async def read_body() -> bytes:
    """The body of the request that is being served; the edge has bounded it."""
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


async def off_loop_if_large[Result](size: int, work: Callable[[], Result]) -> Result:
    """Do `work`, in a thread if the body that it is about is large."""
    return await asyncio.to_thread(work) if size >= LARGE_BODY_BYTES else work()


def _refusal(error: QueueFullError | NeverFitsError | EngineDeadError) -> ApiError:
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(RETRY_AFTER_SECS)}
        return OverloadedError("Too many requests are waiting; try again later.", code="queue_full", headers=headers)
    if isinstance(error, NeverFitsError):
        return InvalidRequestError(str(error), code="never_fits")
    return UnavailableError("The engine has stopped.", code="not_ready")
