"""`api/generation/choice.py`: where an answer ends, and logprobs that stay in step with its text."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.generation.choice import ChoiceRules, ChoiceStream, Delta
from api.generation.detokenize import TokenTables
from model.sampling import TokenLogprobs
from scheduler import Event, FinishReason

PIECES = [b"a", b"b", b"ab", b"\xf0", b"\x9f", b"\x98\x80", b"x\xf0\x9f", b"\xc4", b"\x8f", b" c", b"ba\n", b""]
END = len(PIECES)
RULES = ChoiceRules(index=0, prompt_index=0, prompt_token_ids=(0,))


class Source:
    """Token i is PIECES[i]; END is special."""

    strips_leading_space = True

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else PIECES[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == END


def logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5 - token_id)


def events(token_ids: Sequence[int], reason: FinishReason = FinishReason.LENGTH) -> list[Event]:
    """One event a token; the last one ends the request."""
    ordinary = [Event("r", token_id, logprobs(token_id), num_cached_tokens=3) for token_id in token_ids]
    ordinary[-1] = ordinary[-1]._replace(finish_reason=reason)
    return ordinary


def run(rules: ChoiceRules, stream: Sequence[Event], take_at: Sequence[int] = ()) -> tuple[ChoiceStream, list[Delta]]:
    choice = ChoiceStream(rules, TokenTables(Source()))
    deltas = []
    for position, event in enumerate(stream):
        choice.push(event)
        if position in take_at:
            deltas.append(choice.take())
    return choice, [*deltas, choice.take()]


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


TOKENS = st.lists(st.integers(0, END), min_size=1, max_size=14)
STOPS = st.lists(st.text(alphabet="ab\n c", min_size=1, max_size=3), max_size=3).map(tuple)


@given(TOKENS, TOKENS, STOPS, st.integers(0, 4), st.lists(st.integers(0, 13)), st.booleans(), st.booleans())
def test_tokens_are_the_text(
    prompt: list[int],
    output: list[int],
    stops: tuple[str, ...],
    min_tokens: int,
    take_at: list[int],
    echo: bool,
    strips: bool,
) -> None:
    rules = ChoiceRules(
        index=0,
        prompt_index=0,
        prompt_token_ids=prompt if echo else (0,),
        echo_token_ids=prompt if echo else (),
        stop_strings=stops,
        min_tokens=min_tokens,
        starts_text=strips,
    )
    stream = events(output)
    plain, whole = run(rules, stream)
    _, pieces = run(rules, stream, take_at)
    assert text_of(pieces) == text_of(whole)
    aligned = replace(rules, wants_logprobs=True)
    with_logprobs, chunks = run(aligned, stream, take_at)
    assert text_of(chunks) == text_of(whole)
    assert (with_logprobs.num_tokens, with_logprobs.stop_string) == (plain.num_tokens, plain.stop_string)
    for chunk in chunks:
        assert "".join(token.text for token in chunk.tokens) == chunk.text
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert tokens == list(run(aligned, stream)[1][0].tokens)
    assert b"".join(token.piece for token in tokens).decode(errors="replace") == text_of(whole)
    position = 0
    for token in tokens:
        assert token.offset == position
        position += len(token.text)
    if plain.stop_string is None:
        assert len(tokens) == len(output) + (len(prompt) if echo else 0)
    else:
        assert plain.finish_reason is FinishReason.STOP
        assert not any(stop in text_of(whole) for stop in stops) or echo or min_tokens


def test_end_token_counts_and_has_no_text() -> None:
    choice, deltas = run(replace(RULES, wants_logprobs=True), events([0, 1, END], FinishReason.STOP))
    assert (text_of(deltas), choice.num_tokens, choice.finish_reason) == ("ab", 3, FinishReason.STOP)
    assert [(token.text, token.piece) for token in deltas[0].tokens] == [("a", b"a"), ("b", b"b"), ("", b"")]


def test_ordinary_stop_token_has_no_text_either() -> None:
    choice, deltas = run(RULES, events([0, 1], FinishReason.STOP))
    assert (text_of(deltas), choice.num_tokens) == ("a", 2)


def test_events_after_a_stop_string_are_ignored() -> None:
    rules = replace(RULES, stop_strings=("ba",))
    choice, deltas = run(rules, [*events([0, 1, 2, 0, 0]), Event("r", finish_reason=FinishReason.ABORT)], [2])
    assert [delta.finish_reason for delta in deltas] == [FinishReason.STOP, FinishReason.STOP]
    assert (text_of(deltas), choice.num_tokens, choice.stop_string) == ("a", 3, "ba")


def test_text_held_back_comes_out_at_the_end() -> None:
    rules = replace(RULES, stop_strings=("abab",))
    _, deltas = run(rules, events([9, 2, 0, END], FinishReason.STOP), [1, 2])
    assert [delta.text for delta in deltas] == [" c", "", "aba"]


@pytest.mark.parametrize(("min_tokens", "text", "count"), [(0, "", 2), (1, "ab", 4), (2, "ab", 4), (4, "abab", 4)])
def test_stop_strings_are_looked_for_after_min_tokens(min_tokens: int, text: str, count: int) -> None:
    rules = replace(RULES, stop_strings=("ab",), min_tokens=min_tokens)
    choice, deltas = run(rules, events([0, 1, 0, 1]))
    assert (text_of(deltas), choice.num_tokens) == (text, count)


@pytest.mark.parametrize("given_text", [None, "a b"])
def test_echo_with_no_new_tokens(given_text: str | None) -> None:
    prompt = (0, 9, 3)
    rules = replace(RULES, echo_token_ids=prompt, echo_text=given_text, wants_logprobs=True)
    pieces = [Event("r", prompt_logprobs=(logprobs(9),)), Event("r", prompt_logprobs=(logprobs(3),))]
    choice, deltas = run(rules, [*pieces, Event("r", finish_reason=FinishReason.LENGTH)])
    assert choice.num_tokens == 0
    assert text_of(deltas) == (given_text or "a c")
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.logprobs for token in tokens] == [None, logprobs(9), logprobs(3)]
    assert [token.offset for token in tokens] == [0, 1, 3]


def test_a_character_begun_in_the_prompt_is_finished_in_the_answer() -> None:
    rules = replace(RULES, prompt_token_ids=(0, 3, 4))
    assert text_of(run(rules, events([5, 0]))[1]) == "\U0001f600a"
    assert text_of(run(replace(rules, echo_token_ids=(0, 3, 4)), events([5, 0]))[1]) == "a\U0001f600a"


def test_special_tokens_of_an_echoed_prompt_are_spelled_unless_the_tokenizer_added_them() -> None:
    def echoed(given_text: str | None) -> str:
        return text_of(run(replace(RULES, echo_token_ids=(END, 9), echo_text=given_text), events([0]))[1])

    assert (echoed(None), echoed("c"), echoed("<end> c")) == ("<end> ca", "ca", "<end> ca")
    rules = replace(RULES, echo_token_ids=(END, 9), echo_text="c", wants_logprobs=True)
    tokens = [token.text for delta in run(rules, events([0]))[1] for token in delta.tokens]
    assert tokens == ["", "c", "a"]


def test_echo_of_a_conversation_is_text_alone() -> None:
    _, deltas = run(replace(RULES, echo_text="Sure,\n\n", wants_logprobs=True), events([0]))
    assert (text_of(deltas), [token.text for token in deltas[0].tokens]) == ("Sure,\n\na", ["a"])


def test_errors_are_kept() -> None:
    choice, _ = run(RULES, [*events([0])[:0], Event("r", finish_reason=FinishReason.ERROR, error="no")])
    assert (choice.finish_reason, choice.error) == (FinishReason.ERROR, "no")
