"""Server-sent events of a streamed answer, as text. Made by `answer.py`, one writer per call.

A thousand events a second are written on the cores that run the model too, so what is the same in every chunk is
encoded once and only the text, and the logprobs if asked for, are encoded per event. Everything is plain ASCII: some
clients split lines at U+2028 or U+0085 too.

The grammar: for chat a first chunk with the role, once per choice; then deltas with `finish_reason` null; the last
chunk of a choice has its last delta and its `finish_reason`; then, if asked for, one chunk with `usage` and no choices;
then `[DONE]`. After a failure there is one event with `error` and nothing more, no `[DONE]` either.
"""

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Protocol

from api.generation.alignment import AlignedToken
from api.generation.choice import Delta
from api.generation.wire import Usage, encode_ascii
from api.protocol.errors import ApiError

DONE = "data: [DONE]\n\n"

# Turns the aligned tokens of a delta into the JSON of `logprobs`.
LogprobsEncoder = Callable[[Sequence[AlignedToken]], str]


class ChunkWriter(Protocol):
    """The chunks of one call."""

    frame: "Frame"

    def chunk(self, index: int, delta: Delta) -> str:
        """What is new of the choice of that index, as one or more events. Not for two threads at once."""


def error_event(error: ApiError) -> str:
    """The event that ends a stream that failed."""
    return f"data: {json.dumps(error.envelope())}\n\n"


class Frame:
    """What every chunk of a call has in common: its opening, and the end of a choice."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str):
        """`kind`: the `object` of the chunks."""
        self.opening = (
            f'data: {{"id":{quote(answer_id)},"object":"{kind}","created":{created},"model":{quote(model)},"choices":['
        )
        self.ordinary_end = ',"logprobs":null,"finish_reason":null}]}\n\n'

    def end(self, delta: Delta, encode_logprobs: LogprobsEncoder | None) -> str:
        """What follows the text of a delta. `encode_logprobs`: None where no logprobs were asked for."""
        reason = delta.finish_reason
        if reason is None and encode_logprobs is None:
            return self.ordinary_end
        logprobs = "null" if encode_logprobs is None else encode_logprobs(delta.tokens)
        return f',"logprobs":{logprobs},"finish_reason":{"null" if reason is None else quote(reason.value)}}}]}}\n\n'

    def usage(self, usage: Usage) -> str:
        """The chunk that reports usage."""
        return f'{self.opening}],"usage":{encode_ascii(usage)}}}\n\n'


class ChatChunks:
    """Chunks of a chat; see `ChunkWriter`."""

    def __init__(self, frame: Frame, encode_logprobs: LogprobsEncoder | None):
        self.frame = frame
        self._encode_logprobs = encode_logprobs
        self._openings: dict[int, str] = {}

    def chunk(self, index: int, delta: Delta) -> str:
        """See `ChunkWriter`."""
        opening = self._openings.get(index)
        first = ""
        if opening is None:
            opening = self._openings[index] = f'{self.frame.opening}{{"index":{index},"delta":{{'
            first = f'{opening}"role":"assistant","content":""}}{self.frame.ordinary_end}'
        content = f'"content":{quote(delta.text)}' if delta.text else ""
        return f"{first}{opening}{content}}}{self.frame.end(delta, self._encode_logprobs)}"


class CompletionChunks:
    """Chunks of a text completion; see `ChunkWriter`."""

    def __init__(self, frame: Frame, encode_logprobs: LogprobsEncoder | None):
        self.frame = frame
        self._encode_logprobs = encode_logprobs

    def chunk(self, index: int, delta: Delta) -> str:
        """See `ChunkWriter`."""
        frame = self.frame
        end = frame.end(delta, self._encode_logprobs)
        return f'{frame.opening}{{"index":{index},"text":{quote(delta.text)}{end}'
