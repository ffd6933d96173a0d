"""The body of `POST /v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from api.protocol.common import MAX_LOGPROBS, MAX_PROMPTS, UNSUPPORTED_EVERYWHERE, FieldError, SamplingFields

Prompt = str | tuple[int, ...]
PromptInput = str | list[str] | list[int] | list[list[int]]


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of ids, or a list of lists of ids → the prompts, none of them empty."""
    if isinstance(value, str) or _is_token_list(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")
    if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts, not {len(value)}")
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif _is_token_list(item):
            prompts.append(tuple(item))
        else:
            raise ValueError("every prompt must be a string or a list of token ids, not empty")
        if not prompts[-1]:
            raise ValueError("a prompt must not be empty")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ValueError("must not mix strings and token ids")
    return tuple(prompts)


class CompletionRequest(SamplingFields):
    """Text completion. `max_tokens` may be 0 together with `echo`: the prompt is scored and nothing is generated.

    `best_of` is not supported: it may be 1, which asks for nothing, and only if `n` is 1 too.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED_EVERYWHERE, "suffix": ("",)}

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts, json_schema_input_type=PromptInput)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    parse_special: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_none(self) -> Self:
        if self.best_of is not None and (self.best_of, self.n) != (1, 1):
            raise FieldError("best_of", "is known but not supported yet, other than 1 with one choice")
        return self
