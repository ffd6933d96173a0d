"""`api/generation/stop_strings.py` against a brute-force oracle, at every alignment."""

from hypothesis import given
from hypothesis import strategies as st

from api.generation.stop_strings import StopMatcher

ALPHABET = st.text(alphabet="ab]^-", min_size=1, max_size=5)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that ends first, then the one that starts first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper prefix of a stop string."""
    lengths = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(lengths, default=0)


@given(st.lists(ALPHABET, min_size=1, max_size=4), st.lists(st.text(alphabet="ab]^-", max_size=4), max_size=12))
def test_matches_the_oracle_and_holds_back_no_more_than_it_must(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    released = ""
    expected, stop = oracle("".join(deltas), stops)
    for delta in deltas:
        seen += delta
        out, found = matcher.push(delta)
        released += out
        assert expected.startswith(released)
        if found is not None:
            assert (released, found) == (expected, stop)
            return
        assert released == seen[: len(seen) - held_back(seen, stops)]
    assert stop is None
    assert released + matcher.finish() == expected


@given(st.lists(ALPHABET, min_size=1, max_size=4), st.text(alphabet="ab]^-", max_size=20), st.data())
def test_result_does_not_depend_on_the_alignment(stops: list[str], text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    results = []
    for deltas in ([text], [text[:cut], text[cut:]], list(text)):
        matcher = StopMatcher(stops)
        released = ""
        for delta in deltas:
            out, found = matcher.push(delta)
            released += out
            if found is not None:
                break
        else:
            released += matcher.finish()
            found = None
        results.append((released, found))
    assert results[0] == results[1] == results[2] == oracle(text, stops)


def test_ends_first_then_starts_first() -> None:
    assert StopMatcher(["bcd", "abcde", "c"]).push("xabcdefg") == ("xab", "c")
    assert StopMatcher(["bc", "abc"]).push("xabc") == ("x", "abc")


def test_a_very_long_stop_string_costs_no_more_than_the_text() -> None:
    matcher = StopMatcher(["a" * 1_000_000])
    for _ in range(1000):
        assert matcher.push("aaaa") == ("", None)
    assert matcher.push("b") == ("a" * 4000 + "b", None)
