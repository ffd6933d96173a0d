"""Drawing tokens on the device: penalties, bias, masks, filters and a counter-based draw. Called by `model/step.py`.

No sort of the vocabulary, and no compile-time variant: what a step does not need is skipped by a branch at run time.
Every rule is per row, so a row's token depends on no neighbour.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.sampling import MAX_LOGPROBS

PREFILTER = 64
GREEDY_TEMPERATURE = 1e-5
LANES = 128


class SlotState(NamedTuple):
    """What the device remembers of each slot between steps; S slots.

    Attributes:
        last_tokens: [S] int32, the token drawn last.
        output_counts: [S, V] int32, how often each token was drawn. prompt_seen: [S, V] bool.
        bias: [S, V] float32. All three are kept up only for rows that are `ADJUSTED`.
    """

    last_tokens: jax.Array
    output_counts: jax.Array
    prompt_seen: jax.Array
    bias: jax.Array


class RowRules(NamedTuple):
    """Sampling rules of R rows; see `model.sampling.SamplingParams`. Integer arrays are int32, flags bool.

    `keys` is [R, 4]: seed high and low word, choice, absolute position of the token to draw.
    `stops_masked` rows cannot draw their `stop_token_ids` [R, 64] yet.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    adjusted: jax.Array
    stops_masked: jax.Array
    stop_token_ids: jax.Array
    keys: jax.Array


def adjust(logits: jax.Array, slots: jax.Array, rules: RowRules, state: SlotState) -> jax.Array:
    """Penalties, bias and masked stop tokens: logits [R, V] → [R, V]. Other rows come back as they were.

    Repetition penalty: CTRL (arXiv:1909.05858), over prompt and output. Presence and frequency: OpenAI's API reference.
    """
    counts = state.output_counts[slots]
    seen = (counts > 0) | state.prompt_seen[slots]
    repetition = rules.repetition[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    result = jnp.where(seen, penalised, logits)
    result = result - rules.frequency[:, None] * counts - rules.presence[:, None] * (counts > 0)
    result = result + state.bias[slots]
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(rules.stops_masked[:, None], rules.stop_token_ids, logits.shape[1])
    result = result.at[rows, ids].set(-jnp.inf, mode="drop")
    return jnp.where(rules.adjusted[:, None], result, logits)


def greedy(logits: jax.Array) -> jax.Array:
    """The lowest id of the greatest logit: [R, V] → [R] int32."""
    best = logits.max(-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits == best, ids, logits.shape[1] - 1), axis=-1)


def draw(logits: jax.Array, rules: RowRules) -> jax.Array:
    """One token per row: [R, V] → [R] int32. Greedy where the temperature is 0, or top_k is 1, or top_p is 0."""
    is_greedy = (rules.temperature < GREEDY_TEMPERATURE) | (rules.top_k == 1) | (rules.top_p <= 0)
    temperature = jnp.where(is_greedy, 1.0, rules.temperature)[:, None]
    # Shifted by the maximum first, so that a tiny temperature cannot overflow to inf - inf.
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    threshold = _threshold(scaled, rules)
    weights = jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0.0)
    picked = _invert_cumulative(weights, _uniform(rules.keys))
    return jnp.where(is_greedy, greedy(logits), picked)


def _uniform(keys: jax.Array) -> jax.Array:
    """One number in [0, 1) for each (seed, choice, position): [R, 4] int32 → [R] float32. Threefry (Salmon et al.)."""

    def one(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words[:2].astype(jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, words[2]), words[3]))

    return jax.vmap(one)(keys)


def _threshold(scaled: jax.Array, rules: RowRules) -> jax.Array:
    """The least scaled logit that each row keeps after top-k, top-p and min-p: [R]. Scaled rows have maximum 0.

    Ties at the threshold are all kept. Top-p is taken over what top-k leaves, renormalised.
    """
    vocab = scaled.shape[1]
    top_k = jnp.where((rules.top_k <= 0) | (rules.top_k > vocab), vocab, rules.top_k)
    unfiltered = (top_k == vocab) & (rules.top_p >= 1)
    width = min(PREFILTER, vocab)
    best = jax.lax.top_k(scaled, width)[0]
    best_weights = jnp.exp(best)
    kept = jnp.arange(width)[None] < top_k[:, None]
    total = jnp.where(top_k > width, jnp.exp(scaled).sum(-1), jnp.where(kept, best_weights, 0).sum(-1))
    before = jnp.cumsum(best_weights, -1) - best_weights
    wanted = kept & (before < (rules.top_p * total)[:, None])
    count = jnp.maximum(wanted.sum(-1), 1)
    quick = jnp.take_along_axis(best, (count - 1)[:, None], axis=1)[:, 0]
    # The prefilter decides when top-k ends within it, or the nucleus does.
    decided = unfiltered | (top_k <= width) | ((best_weights.sum(-1) >= rules.top_p * total) & (rules.top_p < 1))
    threshold = jax.lax.cond(
        decided.all(), lambda: quick, lambda: jnp.where(decided, quick, _exact_threshold(scaled, top_k, rules.top_p))
    )
    threshold = jnp.where(unfiltered, -jnp.inf, threshold)
    return jnp.maximum(threshold, jnp.where(rules.min_p > 0, jnp.log(rules.min_p), -jnp.inf))


def _exact_threshold(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Top-k then top-p by bisection on the order of float32 bit patterns: 2 × 32 passes, no sort."""
    weights = jnp.exp(scaled)
    by_count = _bisect(scaled, lambda kept: kept.sum(-1) >= top_k)
    inside = scaled >= by_count[:, None]
    target = top_p * jnp.where(inside, weights, 0).sum(-1)
    by_mass = _bisect(scaled, lambda kept: jnp.where(kept & inside, weights, 0).sum(-1) >= target)
    return jnp.maximum(by_count, by_mass)


def _bisect(scaled: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The greatest threshold t ≤ 0 for which `enough(scaled >= t)` holds, per row. -inf if none does.

    The bit pattern of a float ≤ 0 grows as the float falls, so magnitudes are searched as integers.
    """
    low = jnp.full(scaled.shape[:1], -1, jnp.int32)
    high = jnp.full(scaled.shape[:1], 0x7F800000, jnp.int32)

    def step(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = enough(scaled >= -jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None])
        return jnp.where(ok, low, middle), jnp.where(ok, middle, high)

    _, high = jax.lax.fori_loop(0, 32, step, (low, high))
    return -jax.lax.bitcast_convert_type(high, jnp.float32)


def _invert_cumulative(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse-transform draw in two levels, which keeps float32 sums short: weights [R, V], uniform [R] → [R] int32."""
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % LANES))).reshape(rows, -1, LANES)
    blocks = padded.sum(-1)
    target = uniform * blocks.sum(-1)
    block = _first_above(blocks, target)
    rest = target - jnp.take_along_axis(jnp.cumsum(blocks, -1) - blocks, block[:, None], axis=1)[:, 0]
    lane = _first_above(jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0], rest)
    return (block * LANES + lane).astype(jnp.int32)


def _first_above(weights: jax.Array, target: jax.Array) -> jax.Array:
    """First index with a positive weight whose cumulative sum exceeds the target, else the last one."""
    index = jnp.arange(weights.shape[1])
    positive = weights > 0
    above = positive & (jnp.cumsum(weights, -1) > target[:, None])
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)


class Logprobs(NamedTuple):
    """Log-probabilities of N positions: of one token [N], and the best ones' ids and values [N, 20]."""

    chosen: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def logprobs(logits: jax.Array, chosen: jax.Array) -> Logprobs:
    """The model's own log-probabilities: logits [N, V], chosen [N]."""
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    width = min(MAX_LOGPROBS, logits.shape[1])
    values, ids = jax.lax.top_k(logits, width)
    values, ids = (jnp.pad(a, ((0, 0), (0, MAX_LOGPROBS - width))) for a in (values, ids))
    picked = jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
    return Logprobs(picked - normaliser, ids, values - normaliser[:, None])


def empty_logprobs(count: int) -> Logprobs:
    """What a branch that is not taken returns."""
    return Logprobs(
        jnp.zeros((count,), jnp.float32),
        jnp.zeros((count, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((count, MAX_LOGPROBS), jnp.float32),
    )
