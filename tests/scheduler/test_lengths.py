"""Lengths of prompts and answers: every form of their text, their distributions, and what is refused."""

import random
from collections import Counter
from math import exp
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import ConfigError
from scheduler.workloads.lengths import MOST, parse_lengths


def drawn_lengths(form: object, count: int = 4000) -> list[int]:
    rng, draw = random.Random(5), parse_lengths("input_lengths", form)
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize("form", [64, "64", " 64 "])
def test_a_number_is_a_fixed_length(form):
    assert set(drawn_lengths(form, 10)) == {64}


def test_uniform_and_choice_draw_all_alike():
    counts = Counter(drawn_lengths("uniform:3-6"))
    assert sorted(counts) == [3, 4, 5, 6]
    assert all(count == pytest.approx(1000, rel=0.15) for count in counts.values())
    counts = Counter(drawn_lengths("choice:16/32/64/64"))
    assert {length: count / 4000 for length, count in counts.items()} == pytest.approx(
        {16: 0.25, 32: 0.25, 64: 0.5}, abs=0.03
    )


def test_lognormal_has_its_median_and_its_percentile():
    lengths = sorted(drawn_lengths("lognormal:500,0.8"))
    assert median(lengths) == pytest.approx(500, rel=0.07)
    assert lengths[int(0.95 * 4000)] == pytest.approx(500 * exp(0.8 * 1.645), rel=0.1)
    lengths = sorted(drawn_lengths("p95:500,2000"))
    assert median(lengths) == pytest.approx(500, rel=0.07)
    assert lengths[int(0.95 * 4000)] == pytest.approx(2000, rel=0.12)
    assert set(drawn_lengths("p95:77,77", 20)) == {77}


@pytest.mark.parametrize(
    "form", ["lognormal:500,3,800", "p95:500,9000,800", "lognormal:500,1e4,800", "lognormal:1e300,9,800"]
)
def test_lognormal_is_clipped(form):
    lengths = drawn_lengths(form)
    assert min(lengths) >= 1
    assert max(lengths) == 800
    assert max(drawn_lengths("lognormal:500,1e6")) == MOST


@pytest.mark.parametrize(
    "form",
    [
        *(
            "",
            "0",
            "-5",
            "1.5",
            "many",
            "uniform",
            "uniform:",
            "uniform:5",
            "uniform:9-3",
            "uniform:0-3",
            "uniform:1-2-3",
        ),
        *("choice:", "choice:1/0", "choice:1,2", "lognormal:5", "lognormal:5,0", "lognormal:-5,1", "lognormal:5,1,0.5"),
        *("lognormal:5,nan", "lognormal:5,1,inf", "lognormal:5,1,9,9", "p95:9,5", "p95:5,9,9,9", "unifrom:1-2"),
        *(f"{MOST + 1}", True, None, 2.5, [3], "p95:5,inf"),
    ],
    ids=str,
)
def test_lengths_that_cannot_be_read_are_refused_with_the_known_forms(form):
    with pytest.raises(ConfigError, match=r"output_lengths .*uniform:16-512.*choice:"):
        parse_lengths("output_lengths", form)


@settings(deadline=None)
@given(form=st.text(alphabet="0123456789uniformchoicelognormalp95:-/,.e", max_size=24), seed=st.integers(0, 99))
def test_any_text_is_either_refused_or_draws_lengths(form, seed):
    try:
        draw = parse_lengths("input_lengths", form)
    except ConfigError:
        return
    rng = random.Random(seed)
    assert all(1 <= draw(rng) <= MOST for _ in range(5))
