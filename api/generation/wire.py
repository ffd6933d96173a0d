"""The JSON of answers, as dataclasses: what OpenAI's clients read. Built by `logprobs.py` and `shapes.py`."""

import json
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """Tokens found in the prefix cache."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a call, over all its choices; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A likely token at some position."""

    token: str
    logprob: float
    bytes: list[int]


@dataclass(frozen=True, slots=True)
class ChatTokenLogprob:
    """A token of a chat answer; `bytes` of all tokens, joined, are the answer's text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@dataclass(frozen=True, slots=True)
class ChatLogprobs:
    """`choices[].logprobs` of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """`choices[].logprobs` of a text completion: four lists of equal length. The first token of a prompt has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """The assistant's turn."""

    role: str
    content: str
    refusal: None = None


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One choice of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One choice of a text completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer[Choice]:
    """A whole answer. `object` tells the two kinds apart; `created` is in seconds since the epoch."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


def encode(value: object) -> bytes:
    """Compact JSON of a dataclass from here."""
    return msgspec.json.encode(value)


def encode_ascii(value: object) -> str:
    """The same with every character beyond ASCII escaped, for events: some clients split lines at U+2028 or U+0085."""
    encoded = msgspec.json.encode(value)
    if encoded.isascii():
        return encoded.decode()
    return json.dumps(msgspec.json.decode(encoded), separators=(",", ":"))
