"""Reads one streamed completion: server-sent events → times of text, token counts, and whether it ended as it should.

Fed by `bench/http_client.py` and read by `bench/load.py`. Both of OpenAI's completion routes are understood. Format:
the HTML standard's event streams, and OpenAI's chunks.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

MAX_BUFFERED_BYTES = 4 << 20
HEAD_BYTES = 400


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the server counted: None where it did not say."""

    prompt: int | None
    completion: int | None
    cached: int | None


class CompletionStream:
    """The sink of one answer. Owned by the task that sent the request.

    Attributes:
        text_times: when each event that carried text was read, of `time.perf_counter`.
        head: the first bytes of the body, for a message when it is no stream.
    """

    def __init__(self) -> None:
        self.text_times: list[float] = []
        self.head = b""
        self._buffer = b""
        self._usage: _Usage | None = None
        self._is_finished = False
        self._is_done = False
        self._error: str | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes of the body."""
        if len(self.head) < HEAD_BYTES:
            self.head += data[: HEAD_BYTES - len(self.head)]
        if self._error is not None:
            return
        buffer = self._buffer + data if self._buffer else data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = buffer.split(b"\n\n")
        if len(self._buffer) > MAX_BUFFERED_BYTES:
            self._error = "an event does not end"
            self._buffer = b""
        for event in events:
            self._on_event(event, now)

    def problem(self) -> str | None:
        """Why a stream that has ended cannot be counted, or None."""
        if self._error is not None:
            return self._error
        if not self._is_finished:
            return "the stream ended without a finish_reason"
        return None if self._is_done else "the stream ended without [DONE]"

    def counts(self) -> TokenCounts:
        """The server's own counts, from the event that carried `usage`."""
        if self._usage is None:
            return TokenCounts(None, None, None)
        details = self._usage.prompt_tokens_details
        return TokenCounts(
            self._usage.prompt_tokens, self._usage.completion_tokens, None if details is None else details.cached_tokens
        )

    def _on_event(self, event: bytes, now: float) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    self._is_done = True
                else:
                    self._on_chunk(payload, now)

    def _on_chunk(self, payload: bytes, now: float) -> None:
        try:
            chunk = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self._error = f"an event is not a completion chunk: {error}"
            return
        if chunk.error is not None:
            self._error = f"error event: {msgspec.json.encode(chunk.error).decode()[:HEAD_BYTES]}"
            return
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.text or (choice.delta is not None and choice.delta.content):
                self.text_times.append(now)
            if choice.finish_reason is not None:
                self._is_finished = True
