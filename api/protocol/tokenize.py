"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from api.protocol.chat import Messages, TemplateFields, check_conversation
from api.protocol.common import FieldError, RequestModel

MAX_TOKENS = 1 << 20


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) > MAX_TOKENS:
        raise ValueError(f"must have at most {MAX_TOKENS} entries, not {len(value)}")
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("must be a list of token ids")
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
            raise FieldError("prompt", "give either prompt or messages")
        if self.messages is not None:
            check_conversation(self.messages, self.continue_final_message)
            if self.parse_special:
                raise FieldError("parse_special", "is for prompt: in messages special tokens are literal text")
            return self
        for name in TemplateFields.model_fields:
            if getattr(self, name):
                raise FieldError(name, "is for messages, not for prompt")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to text, special tokens spelled out."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(_ids)]
