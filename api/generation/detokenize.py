"""Bytes of tokens to text, as they come. Used by `api/generation/choice.py`, streamed or not."""

import codecs


class IncrementalDetokenizer:
    """Feeds on token bytes and returns the characters that they complete.

    Bytes that can never form a character become U+FFFD, as `bytes.decode(errors="replace")` would have it; bytes of a
    character that is not finished are kept back, and never shown if nothing finishes it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is complete now and was not before."""
        return self._decoder.decode(data)
