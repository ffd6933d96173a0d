"""From token ids to text, one token at a time. Used by `choice.py` for every answer and every echoed prompt.

Streamed and whole answers go through the same `Detokenizer`, so that their texts are equal by construction. It works on
the bytes of tokens, never on decoded pieces: a character may be spread over several tokens.
"""

from codecs import utf_8_decode
from typing import Protocol


class TokenSource(Protocol):
    """What is needed of a tokenizer. Nothing mutates or blocks; any thread may call.

    Attributes:
        strips_leading_space: whether the first token of a text loses one leading space (SentencePiece's ▁ rule).
    """

    strips_leading_space: bool

    def token_bytes(self, token_id: int) -> bytes:
        """The token's raw bytes; for a special token, its literal text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is no part of a text."""
        ...


class TokenPieces(dict[int, bytes]):
    """The bytes that each token adds to a text, looked up once per id; nothing for special tokens if they are skipped.

    One object serves all requests; filling it is idempotent, so threads may share it.
    """

    def __init__(self, tokenizer: TokenSource, *, skip_special_tokens: bool = True):
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        piece = b"" if skipped else self._tokenizer.token_bytes(token_id)
        self[token_id] = piece
        return piece


class TokenTables:
    """The tables of one tokenizer: `pieces` for answers, `spelled` with special tokens written out."""

    __slots__ = ("pieces", "spelled", "strips_leading_space")

    def __init__(self, tokenizer: TokenSource):
        self.pieces = TokenPieces(tokenizer)
        self.spelled = TokenPieces(tokenizer, skip_special_tokens=False)
        self.strips_leading_space = tokenizer.strips_leading_space


class Detokenizer:
    """An incremental UTF-8 decoder over tokens: owns the bytes of the character that is not finished yet.

    The texts returned so far, joined, are what `bytes.decode(errors="replace")` makes of all bytes so far, but without
    an unfinished character at the end: it comes with the token that finishes it (or that makes it invalid), or never.
    """

    __slots__ = ("_pending", "_pieces", "_strips_space")

    def __init__(self, pieces: TokenPieces, *, strips_leading_space: bool = False):
        """`strips_leading_space`: the first bytes of the text lose one space, if they begin with one."""
        self._pieces = pieces
        self._pending = b""
        self._strips_space = strips_leading_space

    @property
    def pending(self) -> bytes:
        """Bytes held back because their character is unfinished; at most 3."""
        return self._pending

    def push(self, token_id: int) -> str:
        """The text that is complete with this token and was not before."""
        piece = self._pieces[token_id]
        return self.decode(self._first(piece) if self._strips_space else piece)

    def piece(self, token_id: int) -> bytes:
        """The bytes that the token adds to this text, for `decode`: the two in turn are `push`."""
        piece = self._pieces[token_id]
        return self._first(piece) if self._strips_space else piece

    def decode(self, piece: bytes) -> str:
        """`push` for a token's bytes, as `piece` gave them."""
        if self._pending:
            piece = self._pending + piece
        text, consumed = utf_8_decode(piece, "replace", False)
        if consumed == len(piece):
            self._pending = b""
            return text
        self._pending = piece[consumed:]
        if _is_half_surrogate(self._pending):
            self._pending = b""
            return text + "\ufffd\ufffd"
        return text

    def _first(self, piece: bytes) -> bytes:
        if not piece:
            return piece
        self._strips_space = False
        return piece[1:] if piece.startswith(b" ") else piece


def unfinished_bytes(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not finish it."""
    _, consumed = utf_8_decode(data, "replace", False)
    return b"" if _is_half_surrogate(data[consumed:]) else data[consumed:]


def _is_half_surrogate(tail: bytes) -> bool:
    """CPython waits for the third byte of an encoded surrogate, though no third byte can make it a character."""
    return len(tail) == 2 and tail[0] == 0xED and tail[1] >= 0xA0
