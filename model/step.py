"""The one program that runs on the device: embed, layers, logits of the last rows, adjustments, draw, logprobs.

`model/runner.py` compiles it once per `StepLayout` and calls it. KV and slot state are donated. Everything that varies
between requests is data; what a step does not need is skipped by a branch, never by another program.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention import AttentionKernels, RaggedBatch
from model.config import ModelConfig
from model.decoder import abstract_decoder, bind
from model.sampler import Logprobs, RowRules, SlotState, adjust, draw, empty_logprobs, greedy, logprobs
from model.staging import RowField, RowFloat, Scalar, StepFields, StepLayout, TokenField

PROMPT_BLOCK = 32


class StepOutputs(NamedTuple):
    """What a step returns to the host.

    Attributes:
        token_ids: [R] int32, meaningful for rows that draw.
        finite: [R] bool, whether the row's logits were all finite.
        output_logprobs: of the drawn tokens, R positions; zeros unless a row asked.
        prompt_logprobs: of each token's known successor, T positions; zeros unless a row asked. None in programs of
            one-token rows.
    """

    token_ids: jax.Array
    finite: jax.Array
    output_logprobs: Logprobs
    prompt_logprobs: Logprobs | None


StepFunction = Callable[
    [tuple[jax.Array, ...], tuple[jax.Array, ...], SlotState, jax.Array],
    tuple[tuple[jax.Array, ...], SlotState, StepOutputs],
]


def build_step(
    config: ModelConfig,
    dtype: jnp.dtype,
    layout: StepLayout,
    *,
    vocab_size: int,
    kernels: AttentionKernels,
    mesh: jax.sharding.Mesh | None,
) -> StepFunction:
    """The step for one layout: (weights in `param_shapes` order, kv, slot state, buffer) → (kv, slot state, outputs).

    `vocab_size` is the tokenizer's: rows of the table beyond it are padding that nobody may draw or see.
    """
    graph, leaves = abstract_decoder(config, dtype)

    def step(
        weights: tuple[jax.Array, ...], kv: tuple[jax.Array, ...], state: SlotState, buffer: jax.Array
    ) -> tuple[tuple[jax.Array, ...], SlotState, StepOutputs]:
        fields = layout.views(buffer)
        batch = _ragged_batch(fields)
        slots = fields.rows[RowField.SLOT]
        tokens = fields.tokens
        fed = state.last_tokens[slots[batch.token_rows]]
        token_ids = jnp.where(tokens[TokenField.FEEDS_SAMPLED] > 0, fed, tokens[TokenField.TOKEN_ID])
        model = bind(graph, leaves, weights)
        hidden, kv = model(
            _shard_tokens(token_ids, mesh), batch, kv, kernels=kernels, single_token_rows=layout.single_token_rows
        )

        def mask_padding(logits: jax.Array) -> jax.Array:
            if vocab_size == config.vocab_size:
                return logits
            return jnp.where(jnp.arange(config.vocab_size) < vocab_size, logits, -jnp.inf)

        last = jnp.maximum(batch.row_starts + batch.row_lengths - 1, 0)
        raw = model.logits(hidden if layout.single_token_rows else hidden[last])
        finite = jnp.isfinite(raw).all(-1)
        raw = mask_padding(raw)
        drawn, state = _draw(raw, fields, slots, state)
        flags = fields.scalars
        output_logprobs = jax.lax.cond(
            flags[Scalar.ANY_LOGPROBS] > 0, lambda: logprobs(raw, drawn), lambda: empty_logprobs(layout.num_rows)
        )
        prompt_logprobs = None
        if not layout.single_token_rows:
            prompt_logprobs = jax.lax.cond(
                flags[Scalar.ANY_PROMPT_LOGPROBS] > 0,
                lambda: _prompt_logprobs(
                    hidden, tokens[TokenField.NEXT_TOKEN_ID], lambda h: mask_padding(model.logits(h))
                ),
                lambda: empty_logprobs(layout.num_tokens),
            )
        return kv, state, StepOutputs(drawn, finite, output_logprobs, prompt_logprobs)

    return step


def _shard_tokens(token_ids: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Spread the tokens of a step over `dp`; activations follow. Left whole where they do not divide."""
    if mesh is None or mesh.shape["dp"] == 1 or token_ids.shape[0] % mesh.shape["dp"]:
        return token_ids
    return jax.lax.with_sharding_constraint(
        token_ids, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    )


def _ragged_batch(fields: StepFields) -> RaggedBatch:
    return RaggedBatch(
        positions=fields.tokens[TokenField.POSITION],
        token_rows=fields.tokens[TokenField.ROW],
        row_starts=fields.rows[RowField.START],
        row_lengths=fields.rows[RowField.LENGTH],
        kv_lengths=fields.rows[RowField.KV_LENGTH],
        page_table=fields.page_table,
        num_tokens=fields.scalars[Scalar.NUM_TOKENS],
        num_single_rows=fields.scalars[Scalar.NUM_SINGLE_ROWS],
    )


def _draw(raw: jax.Array, fields: StepFields, slots: jax.Array, state: SlotState) -> tuple[jax.Array, SlotState]:
    """Draw for every row and remember the tokens of rows that draw: raw [R, V] → ([R], state)."""
    rows, floats = fields.rows, fields.row_floats
    rules = RowRules(
        temperature=floats[RowFloat.TEMPERATURE],
        top_k=rows[RowField.TOP_K],
        top_p=floats[RowFloat.TOP_P],
        min_p=floats[RowFloat.MIN_P],
        presence=floats[RowFloat.PRESENCE],
        frequency=floats[RowFloat.FREQUENCY],
        repetition=floats[RowFloat.REPETITION],
        adjusted=rows[RowField.ADJUSTED] > 0,
        stops_masked=rows[RowField.STOPS_MASKED] > 0,
        stop_token_ids=fields.stop_token_ids,
        keys=jnp.stack(
            [rows[f] for f in (RowField.SEED_HIGH, RowField.SEED_LOW, RowField.CHOICE, RowField.POSITION)], 1
        ),
    )
    adjusted = jax.lax.cond(
        fields.scalars[Scalar.ANY_ADJUSTED] > 0, lambda: adjust(raw, slots, rules, state), lambda: raw
    )
    drawn = jax.lax.cond(
        fields.scalars[Scalar.ANY_SAMPLED] > 0, lambda: draw(adjusted, rules), lambda: greedy(adjusted)
    )
    draws = rows[RowField.DRAWS] > 0
    num_slots = state.last_tokens.shape[0]
    kept = jnp.where(draws, slots, num_slots)
    counted = jnp.where(draws & rules.adjusted, slots, num_slots)
    return drawn, state._replace(
        last_tokens=state.last_tokens.at[kept].set(drawn, mode="drop"),
        output_counts=state.output_counts.at[counted, drawn].add(1, mode="drop"),
    )


def _prompt_logprobs(hidden: jax.Array, next_ids: jax.Array, logits: Callable[[jax.Array], jax.Array]) -> Logprobs:
    """Logprobs of each token's successor, a block of rows at a time: hidden [T, E], next_ids [T]."""
    tokens = hidden.shape[0]
    block = min(PROMPT_BLOCK, tokens)

    def body(index: jax.Array, result: Logprobs) -> Logprobs:
        start = jnp.minimum(index * block, tokens - block)
        piece = logprobs(
            logits(jax.lax.dynamic_slice_in_dim(hidden, start, block)),
            jax.lax.dynamic_slice_in_dim(next_ids, start, block),
        )
        return Logprobs(
            *(jax.lax.dynamic_update_slice_in_dim(old, new, start, 0) for old, new in zip(result, piece, strict=True))
        )

    return jax.lax.fori_loop(0, -(-tokens // block), body, empty_logprobs(tokens))
