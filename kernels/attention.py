"""The attention contract that every implementation serves, and the choice between them. Called by `model/decoder.py`.

KV of one layer is `[P, 2K, page_size, D]`: pages first, so that a page moves as one block; keys and values of a head
next to each other (index 2k is the key of head k, 2k+1 its value), so that a split over heads keeps pairs together.
Page 0 is a sink: padding is written there and nobody reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax


class RaggedBatch(NamedTuple):
    """Where the tokens of one step stand. All arrays int32; T tokens, R rows, M pages per row at most.

    Attributes:
        positions: [T] absolute position of each token.
        token_rows: [T] row of each token.
        row_starts: [R] index of the row's first token. row_lengths: [R] its tokens in this step.
        kv_lengths: [R] positions that the row's last token sees, itself included; 0 for a padding row.
        page_table: [R, M] page ids; entries past the row's pages are 0.
        num_tokens: [] tokens that are real; the rest is padding.
        num_single_rows: [] leading rows that have exactly one token.
    """

    positions: jax.Array
    token_rows: jax.Array
    row_starts: jax.Array
    row_lengths: jax.Array
    kv_lengths: jax.Array
    page_table: jax.Array
    num_tokens: jax.Array
    num_single_rows: jax.Array


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What does not change from step to step.

    Attributes:
        scale: factor on q·k, normally D ** -0.5.
        sliding_window: positions that a token sees, itself included; None for all before it.
        soft_cap: logits become cap · tanh(logits / cap); None for no cap.
        single_token_rows: the program serves only steps whose rows all have one token (T = R, token i in row i).
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    single_token_rows: bool = False


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One implementation of the contract.

    Attributes:
        name: as shown in `/server_info`.
        write: (kv_pages [P,2K,page,D], keys [T,K,D], values [T,K,D], batch) → kv_pages with the tokens written at
            their positions; padding goes to page 0.
        attend: (queries [T,K,G,D], kv_pages, batch, options) → [T,K,G,D] float32. Row r's token at position p sees
            positions ≤ p of its own row. Contents of pages beyond a row's length never reach the result, NaN included.
    """

    name: str
    write: Callable[[jax.Array, jax.Array, jax.Array, RaggedBatch], jax.Array]
    attend: Callable[[jax.Array, jax.Array, RaggedBatch, AttentionOptions], jax.Array]
