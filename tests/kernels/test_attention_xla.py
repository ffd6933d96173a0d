"""The XLA attention against a loop in numpy: every edge of lengths and pages, windows, caps, groups, poisoned pages."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import AttentionOptions, RaggedBatch
from kernels.attention_xla import XLA

PAGE, HEADS, DIM, MAX_PAGES = 4, 2, 16, 40
# One shape for all cases, so that each (group, options) compiles once.
TOKENS, TABLE_ROWS, POOL = 224, 9, 180


def build(rows, group, dtype, seed=0, num_tokens=TOKENS, num_rows=TABLE_ROWS, shared=False):
    """rows: list of (tokens in this step, kv length). Returns queries, poisoned pages, batch, keys and values."""
    rng = np.random.default_rng(seed)
    pages = np.full((POOL, 2 * HEADS, PAGE, DIM), np.nan, np.float32)
    free = list(rng.permutation(np.arange(1, POOL)))
    table = np.zeros((num_rows, MAX_PAGES), np.int32)
    positions, token_rows = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    starts, lengths, kv_lengths = (np.zeros(num_rows, np.int32) for _ in range(3))
    contexts, at, first_page = [], 0, None
    for index, (tokens, kv) in enumerate(rows):
        keys, values = (rng.standard_normal((kv, HEADS, DIM)).astype(np.float32) for _ in range(2))
        mine = [free.pop() for _ in range(-(-kv // PAGE))]
        if shared and first_page is not None and mine and kv - tokens >= PAGE:
            mine[0] = first_page
            keys[:PAGE], values[:PAGE] = contexts[0][0][:PAGE], contexts[0][1][:PAGE]
        elif mine and first_page is None:
            first_page = mine[0]
        table[index, : len(mine)] = mine
        for position in range(kv):
            page = mine[position // PAGE]
            pages[page, 0::2, position % PAGE] = keys[position]
            pages[page, 1::2, position % PAGE] = values[position]
        contexts.append((keys, values))
        starts[index], lengths[index], kv_lengths[index] = at, tokens, kv
        positions[at : at + tokens] = np.arange(kv - tokens, kv)
        token_rows[at : at + tokens] = index
        at += tokens
    queries = rng.standard_normal((num_tokens, HEADS, group, DIM)).astype(np.float32)
    single = next((i for i, (tokens, _) in enumerate(rows) if tokens != 1), len(rows))
    batch = RaggedBatch(
        *(jnp.asarray(a) for a in (positions, token_rows, starts, lengths, kv_lengths, table)),
        jnp.int32(at),
        jnp.int32(single),
    )
    return queries, jnp.asarray(pages, dtype), batch, contexts


def reference(queries, rows, contexts, scale, window=None, cap=None):
    out, at = np.zeros_like(queries), 0
    for (tokens, kv), (keys, values) in zip(rows, contexts, strict=True):
        for i in range(tokens):
            position = kv - tokens + i
            first = 0 if window is None else max(0, position - window + 1)
            scores = np.einsum("kgd,skd->kgs", queries[at + i], keys[first : position + 1]) * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[at + i] = np.einsum("kgs,skd->kgd", weights, values[first : position + 1])
        at += tokens
    return out


ROWS = {
    "one": [(1, 1)],
    "edges": [(1, PAGE - 1), (1, PAGE), (1, PAGE + 1), (1, 1)],
    "decode": [(1, length) for length in (1, 3, 40, 130, 7)],
    "prefill": [(5, 5), (66, 66)],
    "chunk": [(3, 70), (64, 150), (65, 65)],
    "mixed": [(1, 9), (1, 131), (7, 7), (2, 40), (1, 12)],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_matches_the_loop(name, group):
    rows = ROWS[name]
    queries, pages, batch, contexts = build(rows, group, jnp.float32)
    result = np.asarray(XLA.attend(jnp.asarray(queries), pages, batch, AttentionOptions(scale=0.25)))
    at = sum(tokens for tokens, _ in rows)
    np.testing.assert_allclose(result[:at], reference(queries, rows, contexts, 0.25)[:at], atol=2e-5)


@pytest.mark.parametrize(("window", "cap"), [(1, None), (64, None), (7, 2.0)])
def test_window_and_cap(window, cap):
    rows = ROWS["mixed"] + ROWS["chunk"]
    queries, pages, batch, contexts = build(rows, 2, jnp.float32)
    options = AttentionOptions(scale=0.3, sliding_window=window, soft_cap=cap)
    result = np.asarray(XLA.attend(jnp.asarray(queries), pages, batch, options))
    at = sum(tokens for tokens, _ in rows)
    np.testing.assert_allclose(result[:at], reference(queries, rows, contexts, 0.3, window, cap)[:at], atol=2e-5)


def test_program_of_single_rows():
    rows = ROWS["decode"]
    queries, pages, batch, contexts = build(rows, 3, jnp.float32, num_tokens=8, num_rows=8)
    options = AttentionOptions(scale=0.25, single_token_rows=True)
    result = np.asarray(XLA.attend(jnp.asarray(queries), pages, batch, options))
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result[: len(rows)], reference(queries, rows, contexts, 0.25)[: len(rows)], atol=2e-5)


def test_shared_pages_and_bfloat16():
    rows = [(1, 20), (3, 33), (1, 41)]
    queries, pages, batch, contexts = build(rows, 2, jnp.bfloat16, shared=True)
    result = np.asarray(XLA.attend(jnp.asarray(queries), pages, batch, AttentionOptions(scale=0.25)))
    np.testing.assert_allclose(result[:5], reference(queries, rows, contexts, 0.25)[:5], atol=0.03)


def test_write_touches_only_its_tokens_and_the_sink():
    rows = [(1, 5), (6, 9)]
    _, pages, batch, _ = build(rows, 1, jnp.float32)
    before = np.nan_to_num(np.asarray(pages), nan=-7.0)
    rng = np.random.default_rng(1)
    keys, values = (rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32) for _ in range(2))
    after = np.nan_to_num(np.asarray(XLA.write(pages, jnp.asarray(keys), jnp.asarray(values), batch)), nan=-7.0)
    table, at = np.asarray(batch.page_table), 0
    for index, (tokens, kv) in enumerate(rows):
        for position in range(kv - tokens, kv):
            page = table[index, position // PAGE]
            np.testing.assert_array_equal(after[page, 0::2, position % PAGE], keys[at])
            np.testing.assert_array_equal(after[page, 1::2, position % PAGE], values[at])
            before[page, :, position % PAGE] = after[page, :, position % PAGE]
            at += 1
    np.testing.assert_array_equal(before[1:], after[1:])
