"""Fitting step costs: least squares against brute force, recovery of known costs through noise, the choice of programs.

The synthetic runs pad as `model/buckets.py` does and take times from coefficients that are written down here.
"""

import itertools
import random
from functools import partial
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.buckets import BucketLattice
from scheduler import ConfigError
from scheduler.costs import FittedCost, Program, SecondsPer, evaluate, fit_cost, format_report, learn_cost
from scheduler.costs.fit import held_out
from scheduler.costs.learning import MIN_PROGRAM_STEPS
from scheduler.costs.nonnegative import nonnegative_least_squares
from scheduler.simulation.records import StepSample, StepShape

LATTICE = BucketLattice(16, 256, 8)
LAYOUTS = LATTICE.layouts()
PER = SecondsPer(step=0.004, padded_token=2e-4, padded_row=1e-4, kv_token=4e-7, attended=2e-9, row=5e-5)
IDLE = 0.003


def extra_of(tokens: int, rows: int, single: bool) -> float:
    """A wiggle that no line explains: programs are faster or slower than their size says, by up to a fifth."""
    return (PER.step + PER.padded_token * tokens) * 0.2 * random.Random(f"{tokens} {rows} {single}").uniform(-1, 1)


TRUE = FittedCost(
    PER,
    tuple(
        Program(x.num_tokens, x.num_rows, x.single_token_rows, extra_of(x.num_tokens, x.num_rows, x.single_token_rows))
        for x in LAYOUTS
    ),
    IDLE,
)


def shape_of(rng: random.Random) -> StepShape:
    decodes = rng.randint(1, 14)
    contexts = [rng.randint(20, 2000) for _ in range(decodes)]
    chunk = rng.randint(2, 240) if rng.random() < 0.3 else 0
    if chunk and rng.random() < 0.3:
        contexts = []
    earlier = rng.choice((0, 0, 256)) if chunk else 0
    kv = sum(contexts) + earlier + chunk
    rows = len(contexts) + bool(chunk)
    return StepShape(rows, len(contexts) + chunk, chunk, kv, sum(contexts) + chunk * (earlier + chunk))


def sample_of(shape: StepShape, seconds: float, idle: bool = False) -> StepSample:
    single = shape.num_tokens == shape.num_rows
    layout = next(x for x in LAYOUTS if x.holds(shape.num_tokens, shape.num_rows, single))
    return StepSample(shape, layout.num_tokens, layout.num_rows, seconds, idle)


def run_of(count: int, seed: int, noise: float = 0.0, outliers: float = 0.0) -> list[StepSample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        shape, idle = shape_of(rng), rng.random() < 0.05
        seconds = TRUE.step_seconds(shape) * max(0.5, rng.gauss(1, noise)) + IDLE * idle
        samples.append(sample_of(shape, seconds * (50 if rng.random() < outliers else 1), idle))
    return samples


def error_on_new_steps(model: FittedCost, seed: int = 99) -> float:
    rng = random.Random(seed)
    shapes = [shape_of(rng) for _ in range(500)]
    return max(abs(model.step_seconds(shape) / TRUE.step_seconds(shape) - 1) for shape in shapes)


# Least squares


def gram_of(rows: list[list[float]], target: list[float]) -> tuple[list[list[float]], list[float]]:
    columns = list(zip(*rows, strict=True))
    gram = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in columns] for x in columns]
    return gram, [sum(a * b for a, b in zip(x, target, strict=True)) for x in columns]


def loss(gram: list[list[float]], moments: list[float], x: list[float]) -> float:
    n = range(len(x))
    return sum(x[i] * gram[i][j] * x[j] for i in n for j in n) - 2 * sum(moments[i] * x[i] for i in n)


def solve_plain(gram: list[list[float]], moments: list[float]) -> list[float] | None:
    """Cramer's rule, so that the oracle shares no code with the solver."""

    def determinant(m: list[list[float]]) -> float:
        if not m:
            return 1.0
        minors = ([row[:j] + row[j + 1 :] for row in m[1:]] for j in range(len(m)))
        return sum((-1) ** j * m[0][j] * determinant(minor) for j, minor in enumerate(minors))

    whole = determinant(gram)
    if abs(whole) < 1e-9:
        return None
    replaced = ([[*row[:i], moments[k], *row[i + 1 :]] for k, row in enumerate(gram)] for i in range(len(moments)))
    return [determinant(matrix) / whole for matrix in replaced]


def least_by_trying_all(gram: list[list[float]], moments: list[float]) -> float:
    best = 0.0
    for size in range(1, len(moments) + 1):
        for chosen in itertools.combinations(range(len(moments)), size):
            part = solve_plain([[gram[i][j] for j in chosen] for i in chosen], [moments[i] for i in chosen])
            if part is not None and min(part) >= 0:
                full = dict(zip(chosen, part, strict=True))
                best = min(best, loss(gram, moments, [full.get(i, 0.0) for i in range(len(moments))]))
    return best


@pytest.mark.parametrize(
    ("rows", "target", "solution"),
    [
        ([[1, 0], [0, 1]], [3, 4], [3, 4]),
        ([[1, 0], [0, 1]], [3, -4], [3, 0]),
        ([[1, 0], [0, 1]], [-3, -4], [0, 0]),
        # Unbounded, it would be 3 - x: the slope is held at 0 and the intercept is the mean.
        ([[1, 0], [1, 1], [1, 2]], [3, 2, 1], [2, 0]),
        ([[1, 0], [1, 1], [1, 2]], [1, 3, 5], [1, 2]),
        # Features of very different sizes.
        ([[1, 1e9], [1, 2e9], [1, 4e9]], [2, 3, 5], [1, 1e-9]),
    ],
)
def test_least_squares_of_known_solution(rows, target, solution):
    assert nonnegative_least_squares(*gram_of(rows, target)) == pytest.approx(solution, rel=1e-6, abs=1e-12)


def test_a_feature_that_is_always_zero_gets_nothing():
    assert nonnegative_least_squares(*gram_of([[1, 0], [1, 0]], [2, 4])) == pytest.approx([3, 0])
    assert nonnegative_least_squares([[0.0]], [0.0]) == [0.0]
    assert nonnegative_least_squares([], []) == []


def test_two_equal_features_share_one_effect():
    x, y = nonnegative_least_squares(*gram_of([[1, 1], [2, 2], [3, 3]], [2, 4, 6]))
    assert x + y == pytest.approx(2)
    assert min(x, y) >= 0


numbers = st.integers(-5, 5).map(float)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.tuples(st.lists(numbers, min_size=n, max_size=n), numbers), min_size=n, max_size=7)
    )
)
def test_least_squares_is_as_good_as_trying_every_set_of_features(equations):
    gram, moments = gram_of([row for row, _ in equations], [value for _, value in equations])
    solution = nonnegative_least_squares(gram, moments)
    assert min(solution) >= 0
    assert loss(gram, moments, solution) <= least_by_trying_all(gram, moments) + 1e-6


# Which program


def lattice_model() -> FittedCost:
    return FittedCost(
        SecondsPer(step=1), tuple(Program(x.num_tokens, x.num_rows, x.single_token_rows) for x in LAYOUTS)
    )


def test_the_program_is_the_one_that_the_engine_picks():
    model = lattice_model()
    for tokens in range(1, 257):
        for rows in range(1, min(tokens, 16) + 1):
            expected = next(x for x in LAYOUTS if x.holds(tokens, rows, tokens == rows))
            program = model.program_of(tokens, rows)
            assert program is not None
            picked = program.num_tokens, program.num_rows, program.single_token_rows
            assert picked == (expected.num_tokens, expected.num_rows, expected.single_token_rows)


def test_nothing_holds_what_exceeds_every_program():
    assert lattice_model().program_of(257, 4) is None
    assert lattice_model().program_of(17, 17) is None


def test_programs_of_one_token_rows_serve_no_others_and_mixed_ones_serve_both():
    per = SecondsPer(step=1)
    single, mixed = Program(8, 8, True), Program(64, 8, False)
    assert FittedCost(per, (mixed, single)).program_of(5, 5) == single
    assert FittedCost(per, (mixed, single)).program_of(5, 4) == mixed
    assert FittedCost(per, (mixed,)).program_of(5, 5) == mixed
    assert FittedCost(per, (single,)).program_of(5, 4) is None


def test_beyond_the_largest_program_time_grows_along_the_line():
    per = SecondsPer(step=1, padded_token=0.1, padded_row=0.01)
    model = FittedCost(per, (Program(8, 8, True, 0.5), Program(64, 8, False, 0.25)))
    at = lambda tokens, rows: model.step_seconds(StepShape(rows, tokens, 0, 0, 0))  # noqa: E731
    assert at(64, 8) == pytest.approx(1 + 6.4 + 0.08 + 0.25)
    assert at(74, 8) == pytest.approx(at(64, 8) + 1)
    assert at(74, 10) == pytest.approx(at(74, 8) + 0.02)
    assert at(20, 9) == pytest.approx(at(64, 8) + 0.01)
    assert at(9, 9) == pytest.approx(1 + 0.9 + 0.09 + 0.5)
    alone = FittedCost(per, (Program(8, 8, True, 0.5),))
    assert alone.step_seconds(StepShape(2, 20, 20, 0, 0)) == pytest.approx(1 + 2 + 0.02)


def test_a_step_takes_time_whatever_its_corrections_say():
    model = FittedCost(SecondsPer(step=1), (Program(8, 8, True, -5.0),), least_seconds=0.25)
    assert model.step_seconds(StepShape(1, 1, 0, 1, 1)) == 0.25


# Fitting


def test_noiseless_steps_are_recovered():
    assert error_on_new_steps(learn_cost(run_of(4000, 1)).model) < 0.01


def test_noise_and_outliers_are_survived():
    """4 % of noise, 2 % of steps 50 times too long: predictions within 5 % everywhere, coefficients near the truth."""
    learnt = learn_cost(run_of(10_000, 2, noise=0.04, outliers=0.02))
    assert error_on_new_steps(learnt.model) < 0.05
    per = learnt.model.seconds_per
    assert per.kv_token == pytest.approx(PER.kv_token, rel=0.1)
    assert per.attended == pytest.approx(PER.attended, rel=0.4)
    assert per.padded_token == pytest.approx(PER.padded_token, rel=0.2)
    assert learnt.model.idle_seconds == pytest.approx(IDLE, rel=0.2)
    assert 0.015 < learnt.num_trimmed / learnt.num_steps < 0.03


def test_the_same_samples_give_the_same_model_and_their_order_hardly_matters():
    samples = run_of(2000, 3, noise=0.05, outliers=0.02)
    once = fit_cost(samples, seed=4)
    assert fit_cost(samples, seed=4) == once
    assert fit_cost(samples, seed=5).model == once.model
    assert fit_cost(samples, seed=5).errors != once.errors
    shuffled = learn_cost(random.Random(0).sample(samples, len(samples))).model
    assert shuffled.program_seconds(shuffled.programs[0]) == pytest.approx(
        once.model.program_seconds(once.model.programs[0])
    )


def test_a_program_seen_seldom_lies_on_the_line_and_one_seen_often_does_not():
    extra = 0.05
    usual = [sample for sample in run_of(2000, 6) if sample.padded_tokens != 192]
    shape = StepShape(2, 180, 180, 180, 180 * 90)
    odd = sample_of(shape, TRUE.step_seconds(shape) + extra)
    assert odd.padded_tokens == 192

    def learnt(times: int) -> tuple[Program, float]:
        model = learn_cost([*usual, *([odd] * times)]).model
        program = model.program_of(180, 2)
        assert program is not None
        return program, model.step_seconds(shape)

    seldom, on_the_line = learnt(MIN_PROGRAM_STEPS - 1)
    assert (seldom.num_tokens, seldom.extra_seconds, seldom.num_samples) == (192, 0.0, 0)
    often, between = learnt(MIN_PROGRAM_STEPS)
    assert often.num_samples == MIN_PROGRAM_STEPS
    assert on_the_line < between < learnt(100)[1] <= odd.seconds * 1.001
    assert learnt(100)[1] == pytest.approx(odd.seconds, rel=0.02)


def test_a_single_compilation_does_not_move_its_program():
    samples = run_of(1000, 7, noise=0.02)
    shape = StepShape(2, 2, 0, 300, 300)
    slow = sample_of(shape, 20.0)
    calm, hit = learn_cost(samples).model, learn_cost([*samples, slow]).model
    assert hit.step_seconds(shape) == pytest.approx(calm.step_seconds(shape), rel=0.005)


def test_steps_without_padding_need_no_programs():
    rng = random.Random(8)
    per = SecondsPer(step=0.002, kv_token=1e-6, padded_token=1e-4)
    samples = []
    for shape in (shape_of(rng) for _ in range(2000)):
        seconds = FittedCost(per).step_seconds(shape) * rng.gauss(1, 0.02)
        samples.append(StepSample(shape, shape.num_tokens, shape.num_rows, seconds, False))
    model = learn_cost(samples).model
    assert model.programs == ()
    new = [shape_of(rng) for _ in range(200)]
    assert max(abs(model.step_seconds(s) / FittedCost(per).step_seconds(s) - 1) for s in new) < 0.03


def test_a_program_with_as_many_tokens_as_rows_may_be_of_either_kind():
    """(16, 16) is both a program for 16 rows of one token and one for mixed rows."""
    single = StepSample(StepShape(16, 16, 0, 100, 100), 16, 16, 0.01, False)
    mixed = StepSample(StepShape(9, 16, 8, 100, 100), 16, 16, 0.03, False)
    smaller = StepSample(StepShape(3, 3, 0, 100, 100), 4, 4, 0.005, False)
    model = learn_cost([single, mixed, smaller] * 50).model
    assert [(p.num_tokens, p.single_token_rows) for p in model.programs] == [(4, True), (16, True), (16, False)]
    assert model.step_seconds(single.shape) == pytest.approx(0.01, rel=0.05)
    assert model.step_seconds(mixed.shape) == pytest.approx(0.03, rel=0.05)


def test_too_few_busy_steps_are_refused():
    idle = [sample._replace(started_after_idle=True) for sample in run_of(100, 9)]
    with pytest.raises(ConfigError, match="0 of 100 steps ran right after another one; a cost needs 20"):
        learn_cost(idle)
    with pytest.raises(ConfigError, match="0 of 0 steps"):
        learn_cost([])


def test_a_fit_is_quick_and_so_is_the_model():
    samples = run_of(20_000, 10, noise=0.05, outliers=0.01)
    started = perf_counter()
    model = learn_cost(samples).model
    assert perf_counter() - started < 8  # a fifth of what 100 000 steps may take, with room for a busy machine
    shape = samples[0].shape
    started = perf_counter()
    for _ in range(20_000):
        model.step_seconds(shape)
    assert (perf_counter() - started) / 20_000 < 2e-5


# Held-out error


def test_held_out_steps_are_whole_blocks():
    held = held_out(10_050, 0.2, 0)
    assert len(held) == pytest.approx(2010, abs=60)
    assert all(len(held & set(range(start, start + 100))) in (0, 100) for start in range(0, 10_000, 100))
    assert held != held_out(10_050, 0.2, 1)
    assert 0 < len(held_out(2, 0.99, 0)) < 2


def test_errors_are_those_of_the_definition():
    """Predictions of 1 s for steps of 1, 2 and 4 s, and 1.5 s for one of 1 s after idle."""
    shapes = (StepShape(1, 1, 0, 1, 1), StepShape(1, 2, 2, 2, 4), StepShape(2, 3, 2, 3, 5))
    model = FittedCost(SecondsPer(step=1), idle_seconds=0.5)
    plain = [StepSample(shape, 4, 4, 2.0**i, False) for i, shape in enumerate(shapes)]
    errors = {e.name: e for e in evaluate(model, [*plain, StepSample(shapes[0], 4, 4, 1.0, True)])}
    whole = errors["all"]
    assert (whole.num_steps, whole.seconds) == (4, 8.0)
    assert whole.mean_error == pytest.approx((0 + 0.5 + 0.75 + 0.5) / 4)
    assert whole.weighted_error == pytest.approx((0 + 1 + 3 + 0.5) / 8)
    assert whole.p95_error == pytest.approx(0.75)
    assert whole.bias == pytest.approx(4.5 / 8)
    names = ("decode only", "prefill only", "mixed", "after idle", "without hiccups")
    assert [errors[name].num_steps for name in names] == [2, 1, 1, 1, 3]
    assert evaluate(model, [])[0].num_steps == 0


def test_the_report_of_a_clean_run_is_as_good_as_its_noise():
    report = fit_cost(run_of(6000, 11, noise=0.03))
    errors = {e.name: e for e in report.errors}
    for name in ("all", "decode only", "mixed"):
        assert errors[name].mean_error < 0.04
        assert errors[name].bias == pytest.approx(1, abs=0.01)
    assert errors["all"].p95_error < 0.08


def test_the_report_is_a_table():
    text = format_report(fit_cost(run_of(1000, 12, noise=0.03)))
    for part in ("MAPE", "decode only", "without hiccups", "outliers", "after idle", "16 tokens, 16 rows", "KV token"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    only_decodes = [s for s in run_of(1500, 13) if not s.shape.num_prefill_tokens]
    assert "prefill only           0          -" in format_report(fit_cost(only_decodes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(fit_cost, [], holdout=0.0), "holdout is 0.0; it must be greater than 0 and less than 1"),
        (partial(fit_cost, [], holdout=1.0), "holdout is 1.0"),
        (partial(fit_cost, []), "0 steps are too few to hold some out"),
        (partial(SecondsPer, step=-1.0), "seconds per step is -1.0; it must be a finite number of 0 or more"),
        (partial(FittedCost, PER, (Program(8, 8, True),) * 2), "a program is listed twice"),
        (partial(FittedCost, PER, idle_seconds=float("nan")), "idle_seconds is nan"),
        (
            partial(FittedCost, PER, least_seconds=0.0),
            "least_seconds is 0.0; it must be a finite number",
        ),
        (partial(Program, 4, 8, False), "program of 4 tokens and 8 rows, seen 0 times: it cannot be"),
        (partial(Program, 8, 4, True), "one of single-token rows has as many of both"),
        (partial(Program, 8, 8, True, float("inf")), "extra_seconds is inf; it must be finite"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
