"""The two wire formats of answers, chat completions and text completions. Chosen by the routes, used by `answer.py`.

A whole answer is made of one delta per choice, the chunks of a stream of many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from api.generation.alignment import AlignedToken
from api.generation.choice import Delta
from api.generation.chunks import ChatChunks, ChunkWriter, CompletionChunks, Frame
from api.generation.logprobs import TokenNames, chat_logprobs, completion_logprobs
from api.generation.wire import Answer, ChatChoice, ChatMessage, CompletionChoice, Usage, encode, encode_ascii

# Indices of choices, and what is new of each.
Deltas = Sequence[tuple[int, Delta]]


@dataclass(frozen=True, slots=True)
class Heading:
    """What every part of an answer repeats. `created`: seconds since the epoch."""

    answer_id: str
    created: int
    model: str


class AnswerShape(Protocol):
    """The wire format of one route. Neither blocks nor raises.

    Attributes:
        id_prefix: what ids of answers begin with.
    """

    id_prefix: str

    def chunks(self, heading: Heading) -> ChunkWriter:
        """A writer for one streamed answer."""
        ...

    def whole(self, heading: Heading, deltas: Deltas, usage: Usage) -> bytes:
        """The JSON of an answer, from all that its choices had to say. Any thread."""
        ...


class ChatShape:
    """`POST /v1/chat/completions`."""

    id_prefix = "chatcmpl-"

    def __init__(self, names: TokenNames | None):
        """`names`: None where no logprobs were asked for."""
        self._names = names

    def chunks(self, heading: Heading) -> ChunkWriter:
        """See `AnswerShape`."""
        names = self._names

        def encode_logprobs(tokens: Sequence[AlignedToken]) -> str:
            assert names is not None
            return encode_ascii(chat_logprobs(tokens, names))

        return ChatChunks(_frame(heading, "chat.completion.chunk"), encode_logprobs if names is not None else None)

    def whole(self, heading: Heading, deltas: Deltas, usage: Usage) -> bytes:
        """See `AnswerShape`."""
        return encode(
            _answer(heading, "chat.completion", [self._choice(index, delta) for index, delta in deltas], usage)
        )

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        logprobs = None if self._names is None else chat_logprobs(delta.tokens, self._names)
        return ChatChoice(index, ChatMessage("assistant", delta.text), logprobs, _reason(delta))


class CompletionShape:
    """`POST /v1/completions`."""

    id_prefix = "cmpl-"

    def __init__(self, names: TokenNames | None):
        """`names`: None where no logprobs were asked for."""
        self._names = names

    def chunks(self, heading: Heading) -> ChunkWriter:
        """See `AnswerShape`."""
        names = self._names

        def encode_logprobs(tokens: Sequence[AlignedToken]) -> str:
            assert names is not None
            return encode_ascii(completion_logprobs(tokens, names))

        return CompletionChunks(_frame(heading, "text_completion"), encode_logprobs if names is not None else None)

    def whole(self, heading: Heading, deltas: Deltas, usage: Usage) -> bytes:
        """See `AnswerShape`."""
        return encode(
            _answer(heading, "text_completion", [self._choice(index, delta) for index, delta in deltas], usage)
        )

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        logprobs = None if self._names is None else completion_logprobs(delta.tokens, self._names)
        return CompletionChoice(index, delta.text, logprobs, _reason(delta))


def _frame(heading: Heading, kind: str) -> Frame:
    return Frame(kind, heading.answer_id, heading.created, heading.model)


def _answer[Kind](heading: Heading, kind: str, choices: list[Kind], usage: Usage) -> Answer[Kind]:
    return Answer(heading.answer_id, kind, heading.created, heading.model, choices, usage)


def _reason(delta: Delta) -> str:
    assert delta.finish_reason is not None
    return delta.finish_reason.value
