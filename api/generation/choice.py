"""One choice as it grows: engine events in, deltas of text and logprobs out. Used by `api/generation/call.py`.

Streamed and complete answers go through the same code, so their texts are equal by construction. A token's logprobs are
released with the first character that it brings; those of tokens behind a stop string never are.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from api.generation.detokenize import IncrementalDetokenizer
from api.generation.stop_strings import StopMatcher
from api.translate import GenerationTask
from model.sampling import TokenLogprobs
from model.tokenizer import Tokenizer
from scheduler.plan import Event
from scheduler.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of the answer, or of an echoed prompt, with its logprobs.

    Attributes:
        text: the characters that this token completed. data: its bytes; empty for a special token.
        offset: where its text starts, in characters from the start of the returned text.
        logprobs: None for the first token of an echoed prompt.
    """

    text: str
    data: bytes
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Delta:
    """What came since the last delta. `finish_reason` is `stop` or `length`, on the last one only."""

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None


class ChoiceStream:
    """State of one choice. Lives on the event loop; `feed` is called for each event, `take` by the response.

    Attributes:
        completion_tokens: tokens drawn up to the end that the client sees, end and stop tokens included.
        num_cached_tokens: prompt tokens from the prefix cache.
        error: set when the engine failed this request.
        reason: why the choice ended, once it has.
    """

    def __init__(self, task: GenerationTask, tokenizer: Tokenizer, stream_interval: int, abort: Callable[[str], None]):
        self.task = task
        self.completion_tokens = 0
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._abort = abort
        self._detokenizer = IncrementalDetokenizer()
        self._stops = StopMatcher(task.stop)
        self._decoded = 0  # characters decoded so far, held back or not
        self._shown = 0  # characters released so far
        self._unshown: deque[TokenEntry] = deque()
        self._delta = Delta()
        self._since_take = 0
        self._taken_any = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._echoed = task.prompt_text is None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.reason is not None

    @property
    def is_ready(self) -> bool:
        """Whether a streamed response should send what has come: the first token, every interval, and the end."""
        if self.is_finished:
            return self._delta.finish_reason is not None or bool(self._delta.text or self._delta.entries)
        return self._since_take >= (self._interval if self._taken_any else 1)

    def feed(self, event: Event) -> None:
        """Take in an engine event. Events after the end (of a choice that met a stop string) are ignored."""
        if self.is_finished:
            return
        self.num_cached_tokens = event.num_cached_tokens
        if isinstance(event.prompt_logprobs, tuple):
            self._prompt_logprobs.extend(event.prompt_logprobs)
        if event.token_id is not None:
            if not self._echoed:
                self._echo()
            self._add_token(event)
        if event.finish_reason is not None and not self.is_finished:
            self._finish(event)

    def take(self) -> Delta:
        """What has come since the last call; several tokens merge into one delta for a slow reader."""
        delta, self._delta = self._delta, Delta()
        self._since_take = 0
        self._taken_any = True
        return delta

    def _add_token(self, event: Event) -> None:
        token_id = event.token_id
        assert token_id is not None
        self.completion_tokens += 1
        self._since_take += 1
        is_stop = event.finish_reason is FinishReason.STOP
        hidden = is_stop or self._tokenizer.is_special(token_id)
        data = b"" if hidden else self._tokenizer.token_bytes(token_id)
        text = self._detokenizer.feed(data) if data else ""
        if self.task.logprobs is not None and not is_stop:
            logprobs = event.logprobs if isinstance(event.logprobs, TokenLogprobs) else None
            self._unshown.append(TokenEntry(text, data, self._decoded, logprobs))
        self._decoded += len(text)
        self._show(self._stops.feed(text, armed=self.completion_tokens >= self.task.min_tokens))
        if self._stops.matched is not None:
            self._abort(self.task.request.request_id)
            self._end(FinishReason.STOP)

    def _show(self, text: str) -> None:
        self._shown += len(text)
        self._delta.text += text
        # A token that completes no character belongs to the next one that does.
        while self._unshown and self._unshown[0].offset < self._shown:
            self._delta.entries.append(self._unshown.popleft())

    def _finish(self, event: Event) -> None:
        if not self._echoed:
            self._echo()
        self._show(self._stops.finish())
        reason = event.finish_reason
        assert reason is not None
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._delta.entries.extend(self._unshown)
        else:
            self.error = event.error or "the request was aborted"
        self._unshown.clear()
        self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self.reason = reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._delta.finish_reason = reason.value

    def _echo(self) -> None:
        """Put the prompt in front: its text, and its tokens' logprobs if they were asked for."""
        self._echoed = True
        text = self.task.prompt_text or ""
        if self.task.logprobs is not None and self._prompt_logprobs:
            detokenizer = IncrementalDetokenizer()
            offset = 0
            for position, token_id in enumerate(self.task.prompt_token_ids):
                data = self._tokenizer.token_bytes(token_id)
                piece = detokenizer.feed(data)
                if position == 0 and self._tokenizer.strips_leading_space:
                    piece = piece.removeprefix(" ")
                logprobs = self._prompt_logprobs[position - 1] if position else None
                self._delta.entries.append(TokenEntry(piece, data, offset, logprobs))
                offset += len(piece)
        elif self.task.logprobs is not None and len(self.task.prompt_token_ids) == 1:
            self._delta.entries.append(TokenEntry(text, text.encode(), 0, None))
        self._delta.text += text
        self._decoded += len(text)
        self._shown += len(text)
