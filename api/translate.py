"""From a validated body to engine requests. Called by the routes; everything that can be refused is refused here.

That is before any work, so a call is all or nothing.

Seeds: choice i of every prompt draws from (seed, i). Without a seed each call draws a random one.
Strings are not looked into beyond what can fit: see MAX_BYTES_PER_TOKEN.
"""

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from api.protocol.chat import ChatRequest, TemplateFields
from api.protocol.common import SamplingFields
from api.protocol.completions import CompletionRequest
from api.protocol.errors import InvalidRequestError, NotFoundError
from api.protocol.tokenize import TokenizeRequest
from model.chat_template import ChatEncoder, ChatTemplateError
from model.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from model.tokenizer import Tokenizer
from scheduler.request import Request

# No token of any supported vocabulary stands for more bytes than this; a longer text certainly exceeds the context.
MAX_BYTES_PER_TOKEN = 256
DEFAULT_PRIORITY = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is measured against.

    Attributes:
        max_model_len: tokens of prompt and output. max_tokens_for: prompt length → room left in context and pool.
        model_names: names that a request may ask for. service_tiers: tier → priority.
        default_seed: used for requests without a seed; None for a random one each.
        eos_token_ids: ids that end an answer unless `ignore_eos`.
    """

    max_model_len: int
    max_tokens_for: Callable[[int], int]
    model_names: tuple[str, ...]
    service_tiers: Mapping[str, float]
    allow_request_chat_template: bool
    default_seed: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One choice to generate.

    Attributes:
        index: of the choice in the answer. prompt_index: of the prompt in the call.
        request: for the engine. stop: stop strings. min_tokens: before which no stop string counts.
        prompt_text: what `echo` repeats; None without echo. prompt_token_ids: the prompt.
        logprobs: alternatives wanted with each token; None for no logprobs at all.
    """

    index: int
    prompt_index: int
    request: Request
    stop: tuple[str, ...]
    min_tokens: int
    prompt_text: str | None
    prompt_token_ids: tuple[int, ...]
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the choices of all prompts of a call have in common, checked.

    Attributes:
        body: as validated. sampling: of choice 0. priority: in [0, 1].
        max_tokens: as asked for; None for all the room there is.
        max_tokens_param, prompt_param: the fields to blame.
    """

    body: SamplingFields
    sampling: SamplingParams
    priority: float
    max_tokens: int | None
    max_tokens_param: str
    prompt_param: str


class Translator:
    """Turns bodies into tasks for one model. Thread-safe: encoding a long prompt may run beside the event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits):
        self.tokenizer = tokenizer
        self.limits = limits
        self._chat = ChatEncoder(tokenizer)

    def completion_tasks(self, body: CompletionRequest) -> list[GenerationTask]:
        """Tasks of a text completion, ordered by choice index (prompt index · n + i). Raises ApiError."""
        self.check_model(body.model)
        max_tokens = body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise InvalidRequestError(
                "'max_tokens': 0 needs echo: otherwise there is nothing to answer", param="max_tokens"
            )
        for prompt in body.prompt:  # all of what is cheap to check, before the first is encoded
            if isinstance(prompt, str):
                self._check_size(len(prompt), "prompt")
            else:
                self._check_ids(prompt, "prompt")
                self._room(prompt, max_tokens, "prompt", "max_tokens")
        plan = self._plan(body, body.logprobs, max_tokens, "max_tokens", "prompt", scores_prompt=body.echo)
        tasks: list[GenerationTask] = []
        for prompt_index, prompt in enumerate(body.prompt):
            if isinstance(prompt, str):
                ids = self._encode_text(prompt, body.parse_special)
                echo = prompt
            else:
                ids, echo = prompt, self.tokenizer.decode(prompt) if body.echo else ""
            tasks.extend(self._choices(plan, ids, prompt_index, echo if body.echo else None))
        return tasks

    def chat_tasks(self, body: ChatRequest) -> list[GenerationTask]:
        """Tasks of a chat completion, one per choice. Raises ApiError."""
        self.check_model(body.model)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens == 0:
            raise InvalidRequestError(f"'{field}': must be at least 1", param=field)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        # A conversation's echo repeats a message, not the prompt: no logprobs of prompt tokens there.
        plan = self._plan(body, logprobs, max_tokens, field, "messages", scores_prompt=False)
        ids = self._encode_chat(body, body.messages)
        return self._choices(plan, ids, 0, body.messages[-1].content if body.echo else None)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Ids of a text or a conversation. Raises ApiError."""
        if body.model is not None:
            self.check_model(body.model)
        if body.prompt is not None:
            self._check_size(len(body.prompt), "prompt")
            return self.tokenizer.encode(body.prompt, parse_special=body.parse_special)
        return list(self._encode_chat(body, body.messages or []))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids. Raises ApiError for an id that no token has."""
        self._check_ids(ids, "tokens")
        return self.tokenizer.decode(ids)

    def check_model(self, name: str) -> None:
        """Raise NotFoundError unless we serve this name."""
        if name not in self.limits.model_names:
            raise NotFoundError(f"the model '{name[:128]}' does not exist here", param="model", code="model_not_found")

    def priority(self, body: SamplingFields) -> float:
        """`priority`, else what `service_tier` stands for, else the default. Raises ApiError for an unknown tier."""
        if body.service_tier is not None and body.service_tier not in self.limits.service_tiers:
            known = ", ".join(sorted(self.limits.service_tiers))
            raise InvalidRequestError(f"'service_tier': must be one of {known}", param="service_tier")
        if body.priority is not None:
            return body.priority
        if body.service_tier is not None:
            return self.limits.service_tiers[body.service_tier]
        return DEFAULT_PRIORITY

    def _check_size(self, num_characters: int, param: str) -> None:
        """Refuse a text that cannot fit, however it is encoded."""
        if num_characters > self.limits.max_model_len * MAX_BYTES_PER_TOKEN:
            raise self._too_long(f"more than {self.limits.max_model_len}", param)

    def _encode_text(self, text: str, parse_special: bool) -> tuple[int, ...]:
        ids = self.tokenizer.encode(text, parse_special=parse_special)
        if not ids:
            raise InvalidRequestError("'prompt': a prompt must not be empty", param="prompt")
        return tuple(ids)

    def _encode_chat(self, body: TemplateFields, messages: Sequence) -> tuple[int, ...]:
        if body.chat_template is not None and not self.limits.allow_request_chat_template:
            raise InvalidRequestError("'chat_template': not allowed by this server", param="chat_template")
        self._check_size(sum(len(message.content or "") for message in messages), "messages")
        header = body.add_generation_prompt
        try:
            return tuple(
                self._chat.encode(
                    [message.for_template() for message in messages],
                    add_generation_prompt=not body.continue_final_message if header is None else header,
                    continue_final_message=body.continue_final_message,
                    template=body.chat_template,
                    template_kwargs=body.chat_template_kwargs,
                )
            )
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error), param="messages") from None

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if max(ids, default=0) >= self.tokenizer.vocab_size:
            raise InvalidRequestError(
                f"'{param}': token ids must be below {self.tokenizer.vocab_size}, not {max(ids)}", param=param
            )

    def _too_long(self, length: str, param: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"this model's maximum context length is {self.limits.max_model_len} tokens, but the prompt has {length}",
            param=param,
            code="context_length_exceeded",
        )

    def _room(self, ids: Sequence[int], max_tokens: int | None, param: str, max_tokens_param: str) -> int:
        """Output tokens to allow. Raises ApiError where prompt and output do not fit."""
        limit, length = self.limits.max_model_len, len(ids)
        if length > limit or (length == limit and max_tokens != 0):
            raise self._too_long(f"{length} tokens and leaves no room for an answer", param)
        room = self.limits.max_tokens_for(length)
        if max_tokens is None:
            if room < 1:
                raise InvalidRequestError(
                    f"the prompt has {length} tokens, which is more than the KV pool holds", param=param
                )
            return room
        if length + max_tokens > limit:
            raise InvalidRequestError(
                f"this model's maximum context length is {limit} tokens, but {length + max_tokens} were asked for: "
                f"{length} in the prompt and {max_tokens} to generate",
                param=max_tokens_param,
                code="context_length_exceeded",
            )
        if max_tokens > max(room, 0):
            raise InvalidRequestError(
                f"{length} prompt tokens and {max_tokens} to generate exceed the KV pool, which has room for "
                f"{max(room, 0)} after this prompt",
                param=max_tokens_param,
            )
        return max_tokens

    def _plan(
        self,
        body: SamplingFields,
        logprobs: int | None,
        max_tokens: int | None,
        max_tokens_param: str,
        prompt_param: str,
        *,
        scores_prompt: bool,
    ) -> _Plan:
        """Check all that does not depend on a prompt, before any is encoded. Raises ApiError."""
        if max_tokens is not None and body.min_tokens > max_tokens:
            raise self._min_over_max(body.min_tokens, max_tokens)
        self._check_ids(tuple(body.logit_bias), "logit_bias")
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        eos = () if body.ignore_eos else self.limits.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *body.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"'stop_token_ids': must have at most {MAX_STOP_TOKEN_IDS - len(eos)} entries beside the end tokens of "
                f"this model",
                param="stop_token_ids",
            )
        seed = body.seed if body.seed is not None else self.limits.default_seed
        sampling = SamplingParams(
            temperature=body.temperature,
            top_k=max(body.top_k, 0),
            top_p=body.top_p,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=tuple(body.logit_bias.items()),
            seed=secrets.randbits(63) if seed is None else seed,
            logprobs=logprobs,
            prompt_logprobs=logprobs if scores_prompt else None,
            min_tokens=body.min_tokens,
            stop_token_ids=stop_ids,
        )
        return _Plan(body, sampling, self.priority(body), max_tokens, max_tokens_param, prompt_param)

    @staticmethod
    def _min_over_max(min_tokens: int, max_tokens: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"'min_tokens': {min_tokens} is more than max_tokens, {max_tokens}", param="min_tokens"
        )

    def _choices(self, plan: _Plan, ids: tuple[int, ...], prompt_index: int, echo: str | None) -> list[GenerationTask]:
        body, sampling = plan.body, plan.sampling
        room = self._room(ids, plan.max_tokens, plan.prompt_param, plan.max_tokens_param)
        if body.min_tokens > room:
            raise self._min_over_max(body.min_tokens, room)
        now = time.monotonic()
        tasks = []
        for choice in range(body.n):
            request = Request(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=ids,
                max_new_tokens=room,
                arrival_time=now,
                priority=plan.priority,
                stop_token_ids=frozenset(sampling.stop_token_ids),
                min_new_tokens=body.min_tokens,
                cache_salt=body.cache_salt,
                read_prefix_cache=sampling.prompt_logprobs is None,
                sampling=replace(sampling, choice=choice),
                tenant=body.user,
            )
            index = prompt_index * body.n + choice
            tasks.append(
                GenerationTask(index, prompt_index, request, body.stop, body.min_tokens, echo, ids, sampling.logprobs)
            )
        return tasks
