"""`api/generation/detokenize.py`: bytes to text, piece by piece, equal to the whole."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.generation.detokenize import Detokenizer, TokenPieces, unfinished_bytes


class Bytes:
    """Token i is the i-th piece; the last one is special."""

    def __init__(self, pieces: list[bytes], special: bytes = b"<end>", strips_leading_space: bool = False):
        self.pieces = [*pieces, special]
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == len(self.pieces) - 1


def texts(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(TokenPieces(Bytes(pieces)))
    return [detokenizer.push(index) for index in range(len(pieces))]


def decode_tokens(table: TokenPieces, token_ids: Sequence[int], strips_leading_space: bool = False) -> str:
    detokenizer = Detokenizer(table, strips_leading_space=strips_leading_space)
    return "".join(detokenizer.push(token_id) for token_id in token_ids)


def expected(data: bytes) -> str:
    """The whole at once, without what could still become a character."""
    for size in range(1, 4):
        tail = data[-size:]
        if len(tail) == size and is_prefix_of_a_character(tail):
            return data[:-size].decode(errors="replace")
    return data.decode(errors="replace")


def is_prefix_of_a_character(tail: bytes) -> bool:
    options = [bytes(rest) for rest in ([0x80], [0xBF], [0x90], [0xA0], [0x9F], [0x8F])]
    frontier = [tail]
    for _ in range(3):
        frontier = [head + option for head in frontier for option in options]
        for candidate in frontier:
            try:
                if len(candidate.decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


BYTE = st.sampled_from([0x61, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF])


@given(st.lists(st.lists(BYTE, max_size=4).map(bytes), max_size=8))
@example([b"\xf0", b"\x9f\x98", b"\x80"])
@example([b"\xed", b"\xa0", b"\x80"])
@example([b"\xe0", b"\x80"])
def test_joined_texts_are_the_text_of_the_whole(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    joined = "".join(texts(pieces))
    assert joined == expected(whole)
    assert joined == whole[: len(whole) - len(unfinished_bytes(whole))].decode(errors="replace")


@given(st.text(max_size=12), st.data())
def test_valid_text_never_shows_a_replacement_character(text: str, data: st.DataObject) -> None:
    raw = text.encode(errors="ignore")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    seen = ""
    for delta in texts(pieces):
        seen += delta
        assert raw.decode().startswith(seen)
    assert seen == raw.decode()


def test_unfinished_character_is_left_out() -> None:
    assert texts([b"a\xf0", b"\x9f", b"\x98"]) == ["a", "", ""]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    source = Bytes([b"a", b"\xc4", b"\x8f"])
    assert decode_tokens(TokenPieces(source), [0, 3, 1, 3, 2]) == "aď"
    assert decode_tokens(TokenPieces(source, skip_special_tokens=False), [0, 3]) == "a<end>"


@pytest.mark.parametrize(("pieces", "text"), [([b" a", b" b"], "a b"), ([b"a", b" b"], "a b"), ([b"", b"  a"], " a")])
def test_leading_space_rule(pieces: list[bytes], text: str) -> None:
    table = TokenPieces(Bytes(pieces, strips_leading_space=True))
    assert decode_tokens(table, range(len(pieces)), strips_leading_space=True) == text
