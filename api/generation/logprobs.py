r"""OpenAI's two shapes of logprobs, from aligned tokens. Used for chunks and whole answers alike.

How a token is spelled: in the answer itself by the text that it adds (see `alignment.py`), as an alternative by its own
text, or as `bytes:\xf0\x9f` where it holds only part of a character, as OpenAI's completions do. −∞ is -9999.0.
"""

from collections.abc import Sequence

from api.generation.alignment import AlignedToken
from api.generation.detokenize import TokenPieces
from api.generation.wire import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

LEAST_LOGPROB = -9999.0


class TokenNames(dict[int, str]):
    """Token id → how the token is spelled as an alternative. One object serves all requests, as with `TokenPieces`."""

    def __init__(self, spelled: TokenPieces):
        """`spelled`: the bytes of tokens, special ones written out."""
        super().__init__()
        self.pieces = spelled

    def __missing__(self, token_id: int) -> str:
        piece = self.pieces[token_id]
        try:
            name = piece.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
        self[token_id] = name
        return name


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(tokens: Sequence[AlignedToken], names: TokenNames) -> ChatLogprobs:
    """`choices[].logprobs` of a chat answer."""
    return ChatLogprobs(content=[_chat_token(token, names) for token in tokens])


def _chat_token(token: AlignedToken, names: TokenNames) -> ChatTokenLogprob:
    logprobs = token.logprobs
    if logprobs is None:
        return ChatTokenLogprob(token=token.text, logprob=LEAST_LOGPROB, bytes=list(token.piece), top_logprobs=[])
    top = [
        TopLogprob(token=names[token_id], logprob=finite(logprob), bytes=list(names.pieces[token_id]))
        for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    ]
    return ChatTokenLogprob(
        token=token.text, logprob=finite(logprobs.logprob), bytes=list(token.piece), top_logprobs=top
    )


def completion_logprobs(tokens: Sequence[AlignedToken], names: TokenNames) -> CompletionLogprobs:
    """`choices[].logprobs` of a text completion. `top_logprobs` always holds the token itself, beside the likeliest."""
    return CompletionLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[finite(token.logprobs.logprob) if token.logprobs else None for token in tokens],
        top_logprobs=[_alternatives(token, names) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _alternatives(token: AlignedToken, names: TokenNames) -> dict[str, float] | None:
    logprobs = token.logprobs
    if logprobs is None:
        return None
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    alternatives = {names[token_id]: finite(logprob) for token_id, logprob in pairs}
    alternatives.setdefault(names[token.token_id], finite(logprobs.logprob))
    return alternatives
