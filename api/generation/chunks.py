"""Server-sent events of a streamed answer, as text. Made by `answer.py`, one writer per call.

A thousand events a second are written on the cores that run the model too, so what is the same in every chunk is encoded
once and only the text, and the logprobs if asked for, are encoded per event. Everything is plain ASCII: some clients
split lines at U+2028 or U+0085 too.

The grammar: for chat a first chunk with the role, once per choice; then deltas with `finish_reason` null; the last chunk
of a choice has its last delta and its `finish_reason`; then, if asked for, one chunk with `usage` and no choices; then
`[DONE]`. After an error there is one `error` event and nothing more, no `[DONE]` either.
"""

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Protocol

from api.generation.alignment import AlignedToken
from api.generation.call import Choice
from api.protocol.errors import ApiError
from api.protocol.responses import Usage

DONE = "data: [DONE]\n\n"

# Turns the aligned tokens of a delta into the JSON of `logprobs`.
LogprobsEncoder = Callable[[Sequence[AlignedToken]], str]


class ChunkWriter(Protocol):
    """The chunks of one call. Mutates what it knows of each choice; neither blocks nor raises."""

    def chunk(self, choice: Choice) -> str:
        """Everything that is new of a choice, as one or more events."""

    def usage(self, usage: Usage) -> str:
        """The chunk that reports usage."""


def error_event(error: ApiError) -> str:
    """The event that ends a stream that failed."""
    return f"data: {json.dumps(error.envelope())}\n\n"


class _Writer:
    """What the two kinds of chunk share: an opening per choice, and the end of each chunk."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, encode_logprobs: LogprobsEncoder | None):
        self._opening = (
            f'data: {{"id":{quote(answer_id)},"object":"{kind}","created":{created},"model":{quote(model)},"choices":['
        )
        self._encode_logprobs = encode_logprobs
        self._ordinary_end = ',"logprobs":null,"finish_reason":null}]}\n\n'

    def _end(self, choice: Choice, tokens: Sequence[AlignedToken]) -> str:
        """The end of a chunk that has logprobs or a finish reason."""
        logprobs = "null" if self._encode_logprobs is None else self._encode_logprobs(tokens)
        reason = choice.stream.finish_reason
        return f',"logprobs":{logprobs},"finish_reason":{"null" if reason is None else quote(reason.value)}}}]}}\n\n'

    def usage(self, usage: Usage) -> str:
        """See `ChunkWriter`."""
        return f'{self._opening}],"usage":{usage.model_dump_json()}}}\n\n'


class ChatChunks(_Writer):
    """`chat.completion.chunk`."""

    def __init__(self, answer_id: str, created: int, model: str, encode_logprobs: LogprobsEncoder | None):
        super().__init__("chat.completion.chunk", answer_id, created, model, encode_logprobs)
        self._started: dict[int, str] = {}

    def chunk(self, choice: Choice) -> str:
        """See `ChunkWriter`."""
        delta = choice.stream.take()
        index = choice.index
        opening = self._started.get(index)
        first = ""
        if opening is None:
            opening = self._started[index] = f'{self._opening}{{"index":{index},"delta":{{'
            first = f'{opening}"role":"assistant","content":""}}{self._ordinary_end}'
        content = f'"content":{quote(delta.text)}' if delta.text else ""
        if delta.finish_reason is None and self._encode_logprobs is None:
            return f"{first}{opening}{content}}}{self._ordinary_end}"
        return f"{first}{opening}{content}}}{self._end(choice, delta.tokens)}"


class CompletionChunks(_Writer):
    """`text_completion`."""

    def __init__(self, answer_id: str, created: int, model: str, encode_logprobs: LogprobsEncoder | None):
        super().__init__("text_completion", answer_id, created, model, encode_logprobs)

    def chunk(self, choice: Choice) -> str:
        """See `ChunkWriter`."""
        delta = choice.stream.take()
        if delta.finish_reason is None and self._encode_logprobs is None:
            end = self._ordinary_end
        else:
            end = self._end(choice, delta.tokens)
        return f'{self._opening}{{"index":{choice.index},"text":{quote(delta.text)}{end}'
