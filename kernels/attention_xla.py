"""Paged attention in plain XLA: the oracle for every other kernel, and the path on a CPU. See `kernels/attention.py`.

Flash style (Dao et al., arXiv:2205.14135): a loop over blocks of pages with running maximum and sum. The trip count is
data, not shape, so the context length is no compile-time bucket and a short context costs little.
Rows of one token are attended together, batched over rows; longer rows are cut into tiles of query tokens.
"""

import functools

import jax
import jax.numpy as jnp

from kernels.attention import AttentionKernels, AttentionOptions, RaggedBatch

Carry = tuple[jax.Array, jax.Array, jax.Array]

BLOCK_TOKENS = 128
TILE_TOKENS = 64
MASKED = -1e30


# Jitted on their own so that a model of many layers traces and lowers them once.
@jax.jit
def write(kv_pages: jax.Array, keys: jax.Array, values: jax.Array, batch: RaggedBatch) -> jax.Array:
    """Scatter keys and values to their pages. Contract: `AttentionKernels.write`."""
    page_size = kv_pages.shape[2]
    real = jnp.arange(batch.positions.shape[0]) < batch.num_tokens
    pages = jnp.where(real, batch.page_table[batch.token_rows, batch.positions // page_size], 0)
    offsets = jnp.where(real, batch.positions % page_size, 0)
    pairs = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], kv_pages.shape[1], kv_pages.shape[3])
    return kv_pages.at[pages, :, offsets].set(pairs.astype(kv_pages.dtype))


@functools.partial(jax.jit, static_argnames="options")
def attend(queries: jax.Array, kv_pages: jax.Array, batch: RaggedBatch, options: AttentionOptions) -> jax.Array:
    """Attention of every token to its row's context. Contract: `AttentionKernels.attend`."""
    num_rows = batch.kv_lengths.shape[0]
    scaled = queries.astype(jnp.float32) * options.scale
    single = _attend_single_rows(scaled[:num_rows], kv_pages, batch, options)
    if options.single_token_rows:
        return single
    return _attend_tiles(scaled, single, kv_pages, batch, options)


def _gather_block(kv_pages: jax.Array, page_ids: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of B rows: page_ids [B, N], valid [B, S] → two [B·K, S, D] float32, zero where not valid."""
    rows, num_pages = page_ids.shape
    _, double_heads, page_size, head_dim = kv_pages.shape
    heads, span = double_heads // 2, num_pages * page_size
    block = kv_pages[page_ids].reshape(rows, num_pages, heads, 2, page_size, head_dim)
    block = block.transpose(3, 0, 2, 1, 4, 5).reshape(2, rows, heads, span, head_dim).astype(jnp.float32)
    # A NaN in a stale page must not survive its weight of zero: 0 · NaN is NaN.
    block = jnp.where(valid[None, :, None, :, None], block, 0.0)
    # Kept apart from the dots: a gather fused into a dot is pathological on the CPU.
    keys, values = jax.lax.optimization_barrier((block[0], block[1]))
    return keys.reshape(rows * heads, span, head_dim), values.reshape(rows * heads, span, head_dim)


def _cap(scores: jax.Array, options: AttentionOptions) -> jax.Array:
    return scores if options.soft_cap is None else options.soft_cap * jnp.tanh(scores / options.soft_cap)


def _accumulate(carry: Carry, scores: jax.Array, visible: jax.Array, values: jax.Array) -> Carry:
    """One flash update: scores [B, Q, S], visible the same shape, values [B, S, D]; carry (max, sum, weighted sum)."""
    maximum, total, weighted = carry
    scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    product = jnp.einsum("bqs,bsd->bqd", weights, values, preferred_element_type=jnp.float32)
    return new_maximum, total * decay + weights.sum(-1), weighted * decay[..., None] + product


def _pages_per_block(kv_pages: jax.Array, page_table: jax.Array) -> int:
    return min(max(1, BLOCK_TOKENS // kv_pages.shape[2]), page_table.shape[1])


def _pad_table(page_table: jax.Array, pages_per_block: int) -> jax.Array:
    """Pad to whole blocks: a dynamic slice past the end would be clamped, and so read the wrong pages."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))


def _attend_single_rows(
    queries: jax.Array, kv_pages: jax.Array, batch: RaggedBatch, options: AttentionOptions
) -> jax.Array:
    """Rows that have one token each: queries [R, K, G, D] → [R, K, G, D]. Other rows get zeros."""
    rows, heads, group, head_dim = queries.shape
    count = _pages_per_block(kv_pages, batch.page_table)
    span = count * kv_pages.shape[2]
    table = _pad_table(batch.page_table, count)
    lengths = jnp.where(jnp.arange(rows) < batch.num_single_rows, batch.kv_lengths, 0)
    starts = jnp.zeros_like(lengths)
    if options.sliding_window is not None:
        starts = jnp.maximum(lengths - options.sliding_window, 0)
    first = jnp.min(jnp.where(lengths > 0, starts, jnp.iinfo(jnp.int32).max)) // span
    flat_queries = queries.reshape(rows * heads, group, head_dim)

    def body(block_index: jax.Array, carry: Carry) -> Carry:
        page_ids = jax.lax.dynamic_slice(table, (0, block_index * count), (rows, count))
        positions = block_index * span + jnp.arange(span)
        valid = (positions < lengths[:, None]) & (positions >= starts[:, None])
        keys, values = _gather_block(kv_pages, page_ids, valid)
        scores = _cap(jnp.einsum("bqd,bsd->bqs", flat_queries, keys, preferred_element_type=jnp.float32), options)
        visible = jnp.broadcast_to(valid[:, None, None], (rows, heads, group, span)).reshape(scores.shape)
        return _accumulate(carry, scores, visible, values)

    carry = (
        jnp.full((rows * heads, group), MASKED, jnp.float32),
        jnp.zeros((rows * heads, group), jnp.float32),
        jnp.zeros((rows * heads, group, head_dim), jnp.float32),
    )
    _, total, weighted = jax.lax.fori_loop(first, (lengths.max() + span - 1) // span, body, carry)
    return (weighted / jnp.maximum(total, 1e-30)[..., None]).reshape(queries.shape)


def _query_tiles(batch: RaggedBatch, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cut rows of more than one token into tiles: (row [N], first token index [N], number of tiles [])."""
    rows = batch.row_lengths.shape[0]
    lengths = jnp.where(jnp.arange(rows) >= batch.num_single_rows, batch.row_lengths, 0)
    tiles = (lengths + TILE_TOKENS - 1) // TILE_TOKENS
    ends = jnp.cumsum(tiles)
    index = jnp.arange(num_tokens // TILE_TOKENS + rows)
    tile_rows = jnp.minimum(jnp.searchsorted(ends, index, side="right"), rows - 1)
    within = index - (ends - tiles)[tile_rows]
    return tile_rows, batch.row_starts[tile_rows] + within * TILE_TOKENS, ends[-1]


def _attend_tiles(
    queries: jax.Array, single: jax.Array, kv_pages: jax.Array, batch: RaggedBatch, options: AttentionOptions
) -> jax.Array:
    """Tiles of longer rows: queries [T, K, G, D]; `single` [R, K, G, D] fills the leading one-token rows."""
    num_tokens, heads, group, head_dim = queries.shape
    rows = single.shape[0]
    tile_rows, tile_starts, num_tiles = _query_tiles(batch, num_tokens)
    padded_queries = jnp.pad(queries, ((0, TILE_TOKENS), (0, 0), (0, 0), (0, 0)))
    padded_positions = jnp.pad(batch.positions, (0, TILE_TOKENS))
    outputs = jnp.zeros((num_tokens + TILE_TOKENS, heads, group, head_dim), jnp.float32)
    is_single = (jnp.arange(rows) < batch.num_single_rows)[:, None, None, None]
    outputs = outputs.at[:rows].set(jnp.where(is_single, single, 0.0))

    def body(tile: jax.Array, outputs: jax.Array) -> jax.Array:
        start, row = tile_starts[tile], tile_rows[tile]
        tile_queries = jax.lax.dynamic_slice_in_dim(padded_queries, start, TILE_TOKENS)
        tile_positions = jax.lax.dynamic_slice_in_dim(padded_positions, start, TILE_TOKENS)
        used = jnp.arange(TILE_TOKENS) < batch.row_starts[row] + batch.row_lengths[row] - start
        result = _attend_tile(tile_queries, tile_positions, used, row, kv_pages, batch, options)
        old = jax.lax.dynamic_slice_in_dim(outputs, start, TILE_TOKENS)
        return jax.lax.dynamic_update_slice_in_dim(
            outputs, jnp.where(used[:, None, None, None], result, old), start, axis=0
        )

    return jax.lax.fori_loop(0, num_tiles, body, outputs)[:num_tokens]


def _attend_tile(
    queries: jax.Array,
    positions: jax.Array,
    used: jax.Array,
    row: jax.Array,
    kv_pages: jax.Array,
    batch: RaggedBatch,
    options: AttentionOptions,
) -> jax.Array:
    """One tile of one row: queries [Q, K, G, D], positions [Q], used [Q] → [Q, K, G, D]."""
    tokens, heads, group, head_dim = queries.shape
    count = _pages_per_block(kv_pages, batch.page_table)
    span = count * kv_pages.shape[2]
    table = _pad_table(batch.page_table, count)
    last = jnp.max(jnp.where(used, positions, 0))
    first_visible = jnp.zeros((), jnp.int32)
    if options.sliding_window is not None:
        first_visible = jnp.maximum(positions[0] - options.sliding_window + 1, 0)
    by_head = queries.transpose(1, 0, 2, 3).reshape(heads, tokens * group, head_dim)

    def body(block_index: jax.Array, carry: Carry) -> Carry:
        page_ids = jax.lax.dynamic_slice(table, (row, block_index * count), (1, count))
        block_positions = block_index * span + jnp.arange(span)
        keys, values = _gather_block(kv_pages, page_ids, (block_positions <= last)[None])
        scores = _cap(jnp.einsum("bqd,bsd->bqs", by_head, keys, preferred_element_type=jnp.float32), options)
        visible = block_positions[None, :] <= positions[:, None]
        if options.sliding_window is not None:
            visible &= block_positions[None, :] > positions[:, None] - options.sliding_window
        visible = jnp.broadcast_to(visible[None, :, None], (heads, tokens, group, span)).reshape(scores.shape)
        return _accumulate(carry, scores, visible, values)

    carry = (
        jnp.full((heads, tokens * group), MASKED, jnp.float32),
        jnp.zeros((heads, tokens * group), jnp.float32),
        jnp.zeros((heads, tokens * group, head_dim), jnp.float32),
    )
    _, total, weighted = jax.lax.fori_loop(first_visible // span, last // span + 1, body, carry)
    result = weighted / jnp.maximum(total, 1e-30)[..., None]
    return result.reshape(heads, tokens, group, head_dim).transpose(1, 0, 2, 3)


XLA = AttentionKernels(name="xla", write=write, attend=attend)
