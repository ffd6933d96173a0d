"""Drawing against plain numpy: filters, ties, extremes, the counter-based draw, and independence of neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.sampler import RowRules, SlotState, adjust, draw, greedy, logprobs

VOCAB, ROWS = 300, 2048
jit_draw = jax.jit(draw)


def rules(rows, **changes):
    fields = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence": 0.0,
        "frequency": 0.0,
        "repetition": 1.0,
        "adjusted": False,
        "stops_masked": False,
    } | changes
    arrays = {name: jnp.broadcast_to(jnp.asarray(value), (rows,)) for name, value in fields.items()}
    ints = jnp.arange(rows, dtype=jnp.int32)
    keys = jnp.stack([ints * 0, ints * 0 + 7, ints * 0, ints], axis=1)
    return RowRules(**arrays, stop_token_ids=jnp.full((rows, 64), VOCAB, jnp.int32), keys=keys)


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, top-k, top-p and min-p, by sorting."""
    x = (logits - logits.max()).astype(np.float64) / temperature
    p = np.exp(x) / np.exp(x).sum()
    order = np.argsort(-p, kind="stable")
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    cut = order[before >= top_p]
    if top_p < 1:
        p[cut[cut != order[0]]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 100},
        {"top_k": VOCAB + 1},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 150, "top_p": 0.95, "min_p": 0.01, "temperature": 1.7},
    ],
)
def test_histogram_equals_the_filtered_softmax(change):
    logits = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32) * 1.5
    rows = ROWS
    tokens = np.asarray(jit_draw(jnp.broadcast_to(logits, (rows, VOCAB)), rules(rows, **change)))
    expected = allowed(logits, **change)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Chi-square over the tokens with enough mass; 6 standard deviations above its mean is no accident.
    likely = expected * rows > 5
    rest_counts, rest_mass = counts[~likely].sum(), expected[~likely].sum() * rows
    chi = ((counts[likely] - expected[likely] * rows) ** 2 / (expected[likely] * rows)).sum()
    chi += (rest_counts - rest_mass) ** 2 / max(rest_mass, 1)
    freedom = likely.sum()
    assert chi < freedom + 6 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 1e-40},
        {"temperature": 1e-6},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-9},
    ],
)
def test_limits_are_greedy(change):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, VOCAB)) * 50, jnp.float32)
    np.testing.assert_array_equal(jit_draw(logits, rules(ROWS, **change)), np.asarray(logits).argmax(-1))


def test_greedy_takes_the_first_of_a_tie():
    logits = jnp.zeros((2, VOCAB)).at[1, 7].set(1).at[1, 9].set(1)
    assert greedy(logits).tolist() == [0, 7]


def test_infinite_masks_are_never_drawn():
    logits = jnp.full((ROWS, VOCAB), -jnp.inf).at[:, 17].set(0.0).at[:, 20].set(-1.0)
    tokens = set(np.asarray(jit_draw(logits, rules(ROWS, temperature=2.0))).tolist())
    assert tokens == {17, 20}


def test_a_row_depends_on_no_neighbour():
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((8, VOCAB)), jnp.float32)
    alone = np.asarray(jit_draw(logits, rules(8, top_k=20)))
    top_k = jnp.asarray([20, 0, 150, 1, 20, 0, 0, 20])
    top_p = jnp.asarray([1.0, 0.5, 0.9, 0.0, 1.0, 1.0, 0.99, 1.0])
    mixed = np.asarray(jit_draw(logits, rules(8)._replace(top_k=top_k, top_p=top_p)))
    assert [mixed[i] == alone[i] for i in (0, 4, 7)] == [True] * 3


def test_seeds_of_more_than_32_bits_differ():
    logits = jnp.zeros((2, VOCAB))
    keys = jnp.asarray([[0, 1, 0, 5], [1, 1, 0, 5]], jnp.int32)
    many = [jit_draw(logits, rules(2)._replace(keys=keys + jnp.asarray([0, 0, 0, i]))).tolist() for i in range(8)]
    assert any(a != b for a, b in many)


def test_penalties_bias_and_masked_stops():
    rng = np.random.default_rng(1)
    raw = rng.standard_normal((2, VOCAB)).astype(np.float32)
    state = SlotState(
        jnp.zeros(3, jnp.int32),
        jnp.zeros((3, VOCAB), jnp.int32).at[2, 5].set(3),
        jnp.zeros((3, VOCAB), bool).at[2, 9].set(True),
        jnp.zeros((3, VOCAB)).at[2, 11].set(4.0),
    )
    changed = rules(2, presence=0.5, frequency=0.25, repetition=2.0, adjusted=True, stops_masked=True)
    changed = changed._replace(
        stop_token_ids=changed.stop_token_ids.at[0, 0].set(3), adjusted=jnp.asarray([True, False])
    )
    result = np.asarray(adjust(jnp.asarray(raw), jnp.asarray([2, 2]), changed, state))
    expected = raw[0].copy()
    for token in (5, 9):
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[5] -= 0.5 + 3 * 0.25
    expected[11] += 4
    expected[3] = -np.inf
    np.testing.assert_allclose(result[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(result[1], raw[1])


def test_logprobs_are_a_log_softmax_and_sorted():
    raw = np.random.default_rng(2).standard_normal((3, VOCAB)).astype(np.float32)
    chosen = jnp.asarray([0, 10, 299])
    result = logprobs(jnp.asarray(raw), chosen)
    expected = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    np.testing.assert_allclose(result.chosen, expected[np.arange(3), np.asarray(chosen)], atol=1e-5)
    np.testing.assert_array_equal(result.top_ids, np.argsort(-raw, axis=-1, kind="stable")[:, :20])
    np.testing.assert_allclose(result.top_logprobs, -np.sort(-expected, axis=-1)[:, :20], atol=1e-5)
