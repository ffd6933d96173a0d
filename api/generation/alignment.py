"""Logprobs kept in step with the text that is let out. Owned by one `ChoiceStream` whose caller asked for logprobs.

The rule: a token's string and bytes are what it adds to the answer, so that joining them gives the answer's text. Hence
- a token that leaves a character unfinished adds "" and its bytes; the token that finishes it adds the character;
- a special token, an end-of-sequence or stop token adds "" and no bytes;
- a token is let out when all its text is, so that the tokens of a chunk, joined, are the chunk's text;
- at a stop string, the token in which it begins is cut short, and the tokens after that are left out;
- bytes of a character that is never finished are cut off, as they are from the text.
"""

from collections import deque
from dataclasses import dataclass

from model.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class AlignedToken:
    """One token of an answer.

    Attributes:
        text, piece: what it adds, in characters and in bytes. Equal but for characters spread over several tokens.
        offset: where `text` starts in the answer, in characters.
        logprobs: None for the first token of a prompt, which has none.
    """

    token_id: int
    text: str
    piece: bytes
    offset: int
    logprobs: TokenLogprobs | None


class _Waiting:
    """A token not let out yet. `needs`: characters of text that must be out first, None until its bytes are decoded."""

    __slots__ = ("end_byte", "logprobs", "needs", "piece", "start", "text", "token_id")

    def __init__(self, token_id: int, text: str, piece: bytes, logprobs: TokenLogprobs | None):
        self.token_id = token_id
        self.text = text
        self.piece = piece
        self.logprobs = logprobs
        self.start = 0
        self.end_byte = 0
        self.needs: int | None = None


class Alignment:
    """A queue of tokens in order. Positions count decoded characters and bytes since the first `add`."""

    __slots__ = ("_decoded", "_num_bytes", "_num_decoded_bytes", "_released", "_unresolved", "_waiting", "offset")

    def __init__(self) -> None:
        self.offset = 0
        self._waiting: deque[_Waiting] = deque()
        self._unresolved: list[_Waiting] = []
        self._decoded = 0
        self._released = 0
        self._num_bytes = 0
        self._num_decoded_bytes = 0

    def add(
        self, token_id: int, piece: bytes, text: str, num_pending_bytes: int, logprobs: TokenLogprobs | None
    ) -> None:
        """Queue a token. `text` is what became complete with it, `num_pending_bytes` what the decoder still holds."""
        token = _Waiting(token_id, text, piece, logprobs)
        token.start = self._decoded
        self._num_bytes += len(piece)
        token.end_byte = self._num_bytes
        self._num_decoded_bytes = self._num_bytes - num_pending_bytes
        if text and self._unresolved:
            self._resolve()
        self._decoded += len(text)
        if piece and num_pending_bytes:
            self._unresolved.append(token)
        else:
            token.needs = self._decoded
        self._waiting.append(token)

    def release(self, num_characters: int) -> list[AlignedToken]:
        """The tokens all of whose text is out, now that `num_characters` more are."""
        self._released += num_characters
        return self._pop_ready()

    def cut(self) -> list[AlignedToken]:
        """A stop string begins where the released text ends: the token there, cut short, and no more."""
        tokens = self._pop_ready()
        if self._waiting and self._waiting[0].start < self._released:
            first = self._waiting[0]
            tokens.append(self._shortened(first, first.text[: self._released - first.start]))
        self._waiting.clear()
        return tokens

    def finish(self) -> list[AlignedToken]:
        """All tokens that are left, without the bytes of a character that was never finished."""
        self._released = self._decoded
        tokens = self._pop_ready()
        tokens.extend([self._shortened(token, token.text) for token in self._waiting])
        self._waiting.clear()
        self._unresolved.clear()
        return tokens

    def _resolve(self) -> None:
        """Text has come: the bytes of earlier tokens that were waiting for it belong to its first character."""
        decoded = self._num_decoded_bytes
        for token in self._unresolved:
            if token.end_byte <= decoded:
                token.needs = self._decoded + 1
        self._unresolved = [token for token in self._unresolved if token.end_byte > decoded]

    def _pop_ready(self) -> list[AlignedToken]:
        waiting = self._waiting
        ready = []
        while waiting and (needs := waiting[0].needs) is not None and needs <= self._released:
            token = waiting.popleft()
            ready.append(self._place(token, token.text, token.piece))
        return ready

    def _shortened(self, token: _Waiting, text: str) -> AlignedToken:
        unfinished = max(0, token.end_byte - self._num_decoded_bytes)
        removed = unfinished + len(token.text[len(text) :].encode())
        return self._place(token, text, token.piece[: max(0, len(token.piece) - removed)])

    def _place(self, token: _Waiting, text: str, piece: bytes) -> AlignedToken:
        placed = AlignedToken(token.token_id, text, piece, self.offset, token.logprobs)
        self.offset += len(text)
        return placed
