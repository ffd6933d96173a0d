"""One choice of an answer: the engine's events of one request in, text and aligned logprobs out.

Owned by a `GenerationCall`, fed on the event loop. It decides where the answer ends on account of its text (stop
strings); where it ends on account of token ids or limits is the scheduler's decision.

Rules that users may rely on:
- `completion_tokens` counts every token up to the one that ends the answer, which counts too.
- An end-of-sequence or stop token has no text. Special tokens elsewhere have none either.
- Stop strings are looked for only in text that is completed after the first `min_tokens` tokens.
- With `echo`, a text prompt is returned as it was given, one of token ids as those ids decode; special tokens in it are
  spelled out, but for a start token that the tokenizer put in front of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from api.generation.alignment import AlignedToken, Alignment
from api.generation.detokenize import Detokenizer, TokenPieces, TokenTables, unfinished_bytes
from api.generation.stop_strings import StopMatcher
from model.sampling import TokenLogprobs
from scheduler import Event, FinishReason

# A character has at most 4 bytes, so this many of the last bytes of a prompt show whether it ends inside one.
MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What a choice's text and logprobs depend on, as the request asked.

    Attributes:
        index: the choice's index in the answer; prompt_index: which prompt of the call it belongs to.
        prompt_token_ids: of that prompt.
        echo_text: what the answer begins with, as it was given. None: nothing, or what `echo_token_ids` decode to.
        echo_token_ids: tokens that the answer begins with, and that have logprobs if any have.
        wants_logprobs: whether `AlignedToken`s are made.
        stop_strings, min_tokens: see the module.
        starts_text: whether the answer is a text of its own rather than the rest of one (see `TokenSource`).
    """

    index: int
    prompt_index: int
    prompt_token_ids: Sequence[int]
    echo_text: str | None = None
    echo_token_ids: Sequence[int] = ()
    wants_logprobs: bool = False
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    starts_text: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice adds since the last `take`. The last has a `finish_reason`, unless the answer was broken off."""

    text: str
    tokens: tuple[AlignedToken, ...]
    finish_reason: FinishReason | None


class ChoiceStream:
    """Mutable state of one choice. Not thread-safe; nothing blocks.

    Attributes, for reading:
        num_tokens: completion tokens so far. num_unsent_tokens: those since the last `take`.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        finish_reason: None while the answer may go on. error: the engine's message when that is `ERROR`.
        stop_string: the stop string that ended the answer, if one did.
    """

    __slots__ = (
        "_aligned",
        "_alignment",
        "_begun",
        "_detokenizer",
        "_matcher",
        "_min_tokens",
        "_parts",
        "_prompt_logprobs",
        "_rules",
        "_tables",
        "error",
        "finish_reason",
        "num_cached_tokens",
        "num_tokens",
        "num_unsent_tokens",
        "stop_string",
    )

    def __init__(self, rules: ChoiceRules, tables: TokenTables):
        self.num_tokens = 0
        self.num_unsent_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.stop_string: str | None = None
        self._rules = rules
        self._tables = tables
        strips = rules.starts_text and tables.strips_leading_space
        self._detokenizer = Detokenizer(tables.pieces, strips_leading_space=strips and not rules.echo_token_ids)
        self._matcher = StopMatcher(rules.stop_strings) if rules.stop_strings else None
        self._min_tokens = rules.min_tokens
        self._alignment = Alignment() if rules.wants_logprobs else None
        self._parts: list[str] = []
        self._aligned: list[AlignedToken] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._begun = False
        if not rules.echo_token_ids:
            self._detokenizer.decode(_unfinished_end(tables.pieces, rules.prompt_token_ids))

    def push(self, event: Event) -> None:
        """Take one event of this choice's request. Events after the end of the answer are ignored."""
        if self.finish_reason is not None:
            return
        if event.prompt_logprobs is not None:
            assert isinstance(event.prompt_logprobs, tuple)
            self._prompt_logprobs.extend(event.prompt_logprobs)
        token_id = event.token_id
        reason = event.finish_reason
        if not self._begun and (token_id is not None or reason is not None):
            self._begin(event)
        if token_id is not None:
            self.num_tokens += 1
            self.num_unsent_tokens += 1
            if self._alignment is not None:
                self._add_aligned(token_id, event.logprobs, is_stop_token=reason is FinishReason.STOP)
            elif reason is not FinishReason.STOP:
                self._add_text(self._detokenizer.push(token_id))
        if reason is not None and self.finish_reason is None:
            self._finish(reason, event.error)

    @property
    def has_news(self) -> bool:
        """Whether `take` would return text, tokens or the end."""
        return bool(self._parts or self._aligned or self.finish_reason)

    def take(self) -> Delta:
        """All that is new. Joining the deltas gives the answer, however often this is called."""
        reason = self.finish_reason
        if reason is FinishReason.ABORT or reason is FinishReason.ERROR:
            reason = None
        delta = Delta("".join(self._parts), tuple(self._aligned), reason)
        self._parts.clear()
        self._aligned.clear()
        self.num_unsent_tokens = 0
        return delta

    def _begin(self, event: Event) -> None:
        """Before the first token, or at an end without one: what is to be echoed."""
        self._begun = True
        self.num_cached_tokens = event.num_cached_tokens
        rules = self._rules
        if rules.echo_token_ids and self._alignment is not None:
            self._echo_aligned(rules.echo_token_ids, rules.echo_text, self._alignment)
        elif rules.echo_text is not None:
            self._parts.append(rules.echo_text)
        elif rules.echo_token_ids:
            self._echo_decoded(rules.echo_token_ids)

    def _echo_decoded(self, token_ids: Sequence[int]) -> None:
        spelled = self._tables.spelled
        data = b"".join([spelled[token_id] for token_id in token_ids])
        if self._tables.strips_leading_space:
            data = data.removeprefix(b" ")
        pending = unfinished_bytes(data)
        self._detokenizer.decode(pending)
        self._parts.append(data[: len(data) - len(pending)].decode(errors="replace"))

    def _echo_aligned(self, token_ids: Sequence[int], given: str | None, alignment: Alignment) -> None:
        tables = self._tables
        prompt = Detokenizer(tables.spelled, strips_leading_space=tables.strips_leading_space)
        num_characters = 0
        for position, token_id in enumerate(token_ids):
            is_added = position == 0 and given is not None and _is_added_start(tables, token_id, given)
            piece = b"" if is_added else prompt.piece(token_id)
            text = prompt.decode(piece)
            num_characters += len(text)
            known = 0 < position <= len(self._prompt_logprobs)
            logprobs = self._prompt_logprobs[position - 1] if known else None
            alignment.add(token_id, piece, text, len(prompt.pending), logprobs)
        if given is not None:
            self._parts.append(given)
            self._aligned.extend(alignment.finish())
            alignment.offset = len(given)
        else:
            self._detokenizer.decode(prompt.pending)
            self._let_out(alignment.release(num_characters))

    def _add_aligned(self, token_id: int, logprobs: object, *, is_stop_token: bool) -> None:
        assert self._alignment is not None
        assert logprobs is None or isinstance(logprobs, TokenLogprobs)
        detokenizer = self._detokenizer
        piece = b"" if is_stop_token else detokenizer.piece(token_id)
        text = detokenizer.decode(piece)
        self._alignment.add(token_id, piece, text, len(detokenizer.pending), logprobs)
        self._add_text(text)

    def _add_text(self, text: str) -> None:
        """Let out what no stop string can claim; end the answer where one is complete."""
        if self._matcher is not None and self.num_tokens > self._min_tokens:
            text, self.stop_string = self._matcher.push(text)
        alignment = self._alignment
        if self.stop_string is not None:
            self.finish_reason = FinishReason.STOP
            if alignment is not None:
                waiting = alignment.release(len(text))
                self._let_out([*waiting, *alignment.cut()])
                return
        elif alignment is not None:
            self._let_out(alignment.release(len(text)))
            return
        if text:
            self._parts.append(text)

    def _let_out(self, tokens: list[AlignedToken]) -> None:
        """With logprobs, text goes out by whole tokens, so that each chunk's tokens are its text."""
        self._aligned.extend(tokens)
        text = "".join([token.text for token in tokens])
        if text:
            self._parts.append(text)

    def _finish(self, reason: FinishReason, error: str | None) -> None:
        self.finish_reason = reason
        self.error = error
        held = self._matcher.finish() if self._matcher is not None else ""
        if self._alignment is not None:
            self._let_out(self._alignment.finish())
        elif held:
            self._parts.append(held)


def _is_added_start(tables: TokenTables, token_id: int, given: str) -> bool:
    """Whether the first token is a special one that the given text does not spell."""
    return not tables.pieces[token_id] and not given.encode().startswith(tables.spelled[token_id])


def _unfinished_end(pieces: TokenPieces, token_ids: Sequence[int]) -> bytes:
    """The bytes of a character that a prompt of token ids begins and leaves to the answer to finish."""
    end = b""
    for token_id in reversed(token_ids):
        end = pieces[token_id] + end
        if len(end) >= MAX_CHARACTER_BYTES:
            break
    return unfinished_bytes(end)
