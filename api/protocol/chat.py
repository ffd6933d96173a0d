"""The body of `POST /v1/chat/completions`, and the messages in it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from api.protocol.common import MAX_LOGPROBS, MAX_MESSAGES, Count, SamplingFields

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


Content = Annotated[str, BeforeValidator(_content)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class FunctionCall(_Part):
    """The function of a tool call: name, and arguments as a JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(_Part):
    """A tool call in an assistant's earlier turn."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Part):
    """One turn. `developer` is rendered as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role '{self.role}' needs content")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("only a message of role 'assistant' may have tool_calls")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("a message of role 'tool', and no other, needs a tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        fields = self.model_dump(exclude_none=True)
        if fields["role"] == "developer":
            fields["role"] = "system"
        fields.setdefault("content", "")
        return fields


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of messages, not empty")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"must have at most {MAX_MESSAGES} entries, not {len(value)}")
    return value


Messages = Annotated[list[Message], BeforeValidator(_messages)]


class TemplateFields(BaseModel):
    """What chat and tokenize share: a conversation and how to render it."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: Annotated[str, Field(max_length=1 << 20)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _renderable(self) -> Self:
        clash = RESERVED_TEMPLATE_NAMES & set(self.chat_template_kwargs)
        if clash:
            raise ValueError(f"chat_template_kwargs must not set '{sorted(clash)[0]}'")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        return self


def check_conversation(messages: list[Message], continue_final_message: bool) -> None:
    """Rules that span messages. Raises ValueError."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in known:
            raise ValueError(f"messages.{index}.tool_call_id answers no tool call before it")
    if continue_final_message and (messages[-1].role != "assistant" or messages[-1].content is None):
        raise ValueError("continue_final_message needs a last message of role 'assistant' with content")


class ChatRequest(SamplingFields, TemplateFields):
    """Chat completion. `echo` puts the continued message's text in front of the answer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
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
        "verbosity": (),
        "store": (False,),
        "prompt_cache_retention": (),
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
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.echo and not self.continue_final_message:
            raise ValueError("echo needs continue_final_message: there is no text to repeat")
        return self
