"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from api.protocol.chat import Messages, TemplateFields, check_conversation
from api.protocol.common import RequestModel

MAX_TOKENS = 1 << 20


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("must be a list of token ids")
    if len(value) > MAX_TOKENS:
        raise ValueError(f"must have at most {MAX_TOKENS} entries, not {len(value)}")
    return tuple(value)


class TokenizeRequest(RequestModel, TemplateFields):
    """A text (`prompt`) or a conversation (`messages`), not both. Encoded exactly as the completion routes would."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    parse_special: bool = False

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None:
            check_conversation(self.messages, self.continue_final_message)
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to text, special tokens spelled out."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(_ids)]
