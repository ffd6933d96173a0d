"""The body of `POST /v1/chat/completions`, and the messages in it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from api.protocol.common import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    UNSUPPORTED_EVERYWHERE,
    Count,
    FieldError,
    NestedModel,
    SamplingFields,
)
from api.protocol.errors import InvalidRequestError
from api.protocol.json_body import decode_object

# Text parts of all messages together, and variables for the template.
MAX_PARTS = 4096
MAX_TEMPLATE_VARIABLES = 64

# Names that the template gets from the server; a request may not set them.
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "chat_template",
    }
)


def _content(value: Any) -> str:
    """A string, or text parts joined in order. Parts of another kind are refused, never dropped."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts, not empty")
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("every part must be an object with a 'type'")
        if part["type"] != "text":
            raise ValueError("only parts of type 'text' are supported by this model")
        if not isinstance(part.get("text"), str) or set(part) - {"type", "text"}:
            raise ValueError("a text part must have a string 'text' and nothing else")
        texts.append(part["text"])
    return "".join(texts)


class TextPart(NestedModel):
    """A part of a message's content, as the OpenAPI document shows it; `_content` reads it."""

    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]


class FunctionCall(NestedModel):
    """The function of a tool call: name, and arguments as a JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str

    def arguments_for_template(self) -> dict[str, Any] | str:
        """Templates write arguments as JSON themselves, so they want an object; what is none stays the text it is."""
        try:
            return decode_object(self.arguments.encode())
        except InvalidRequestError:
            return self.arguments


class ToolCall(NestedModel):
    """A tool call in an assistant's earlier turn."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(NestedModel):
    """One turn. `developer` is rendered as `system`. An answer of ours, sent back as it came, is a valid turn."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise FieldError("content", f"is required in a message of role '{self.role}'")
        if self.tool_calls is not None and self.role != "assistant":
            raise FieldError("tool_calls", "only a message of role 'assistant' may have them")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise FieldError("tool_call_id", "a message of role 'tool', and no other, has one")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        fields = self.model_dump(exclude_none=True)
        if fields["role"] == "developer":
            fields["role"] = "system"
        fields.setdefault("content", "")
        for call, shown in zip(self.tool_calls or (), fields.get("tool_calls", ()), strict=True):
            shown["function"]["arguments"] = call.function.arguments_for_template()
        return fields


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of messages, not empty")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"must have at most {MAX_MESSAGES} entries, not {len(value)}")
    contents = (message.get("content") for message in value if isinstance(message, dict))
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} content parts in all, not {num_parts}")
    return value


def _template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"must have at most {MAX_TEMPLATE_VARIABLES} entries, not {len(value)}")
    clash = RESERVED_TEMPLATE_NAMES & set(value)
    if clash:
        raise ValueError(f"must not set '{sorted(clash)[0]}'")
    return value


Messages = Annotated[list[Message], BeforeValidator(_messages)]


class TemplateFields(BaseModel):
    """What chat and tokenize share: a conversation and how to render it."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: Annotated[str, Field(max_length=1 << 20)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_variables)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _renderable(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message", "excludes add_generation_prompt")
        return self


def check_conversation(messages: list[Message], continue_final_message: bool) -> None:
    """Rules that span messages. Raises FieldError."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in known:
            raise FieldError(f"messages.{index}.tool_call_id", "answers no tool call before it")
    if continue_final_message and (messages[-1].role != "assistant" or messages[-1].content is None):
        raise FieldError("continue_final_message", "needs a last message of role 'assistant' with content")


class ChatRequest(SamplingFields, TemplateFields):
    """Chat completion. `echo` puts the continued message's text in front of the answer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED_EVERYWHERE,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "store": (False,),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "moderation": (),
    }

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_conversation(self.messages, self.continue_final_message)
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs to be true")
        if self.echo and not self.continue_final_message:
            raise FieldError("echo", "needs continue_final_message: there is no text to repeat")
        return self
