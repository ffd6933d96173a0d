"""The one array that carries a step to the device: a flat int32 buffer, its fields found by a layout of (T, R, M).

`model/runner.py` fills it from a `StepPlan`, `model/step.py` takes it apart inside the jitted step. One buffer is one
transfer; floats travel as their bit patterns. Each step gets a fresh buffer, since JAX on a CPU may alias it.
"""

import itertools
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.sampling import MAX_STOP_TOKEN_IDS


class Scalar(IntEnum):
    """Step-wide numbers. The `ANY_…` flags choose branches at run time, so that no option is a compile-time variant."""

    NUM_TOKENS = 0
    NUM_SINGLE_ROWS = auto()
    ANY_SAMPLED = auto()
    ANY_ADJUSTED = auto()
    ANY_LOGPROBS = auto()
    ANY_PROMPT_LOGPROBS = auto()


class TokenField(IntEnum):
    """Per token, [T] each."""

    TOKEN_ID = 0
    POSITION = auto()
    ROW = auto()
    FEEDS_SAMPLED = auto()
    NEXT_TOKEN_ID = auto()


class RowField(IntEnum):
    """Per row, [R] each. POSITION is the absolute position of the token to be drawn."""

    SLOT = 0
    START = auto()
    LENGTH = auto()
    KV_LENGTH = auto()
    POSITION = auto()
    DRAWS = auto()
    SEED_HIGH = auto()
    SEED_LOW = auto()
    CHOICE = auto()
    TOP_K = auto()
    ADJUSTED = auto()
    STOPS_MASKED = auto()


class RowFloat(IntEnum):
    """Per row, [R] each, float32 bits. TEMPERATURE 0 is greedy."""

    TEMPERATURE = 0
    TOP_P = auto()
    MIN_P = auto()
    PRESENCE = auto()
    FREQUENCY = auto()
    REPETITION = auto()


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Shape of one compiled step.

    Attributes:
        num_tokens: T. num_rows: R. max_pages: M, pages that one row may have.
        single_token_rows: whether the program serves only rows of one token each (then T = R).
    """

    num_tokens: int
    num_rows: int
    max_pages: int
    single_token_rows: bool

    def holds(self, num_tokens: int, num_rows: int, single_token_rows: bool) -> bool:
        """Whether a step fits. A program of mixed rows serves one-token rows too."""
        fits = num_tokens <= self.num_tokens and num_rows <= self.num_rows
        return fits and (single_token_rows or not self.single_token_rows)

    @property
    def _sizes(self) -> tuple[int, ...]:
        rows = self.num_rows
        return (
            len(Scalar),
            len(TokenField) * self.num_tokens,
            len(RowField) * rows,
            len(RowFloat) * rows,
            rows * self.max_pages,
            rows * MAX_STOP_TOKEN_IDS,
        )

    @property
    def size(self) -> int:
        """Length of the buffer, in int32."""
        return sum(self._sizes)

    def views(self, buffer: Any) -> "StepFields":
        """Fields of a buffer, numpy views or traced slices alike."""
        bounds = np.cumsum((0, *self._sizes))
        scalars, tokens, ints, floats, pages, stops = (buffer[a:b] for a, b in itertools.pairwise(bounds))
        return StepFields(
            scalars=scalars,
            tokens=tokens.reshape(len(TokenField), self.num_tokens),
            rows=ints.reshape(len(RowField), self.num_rows),
            row_floats=_as_floats(floats).reshape(len(RowFloat), self.num_rows),
            page_table=pages.reshape(self.num_rows, self.max_pages),
            stop_token_ids=stops.reshape(self.num_rows, MAX_STOP_TOKEN_IDS),
        )


@dataclass(frozen=True, slots=True)
class StepFields:
    """The fields of one buffer: scalars, tokens [5, T], rows [12, R], row_floats [6, R], page_table [R, M], and
    stop_token_ids [R, 64] (an id past the vocabulary where unused).
    """

    scalars: Any
    tokens: Any
    rows: Any
    row_floats: Any
    page_table: Any
    stop_token_ids: Any


def _as_floats(bits: Any) -> Any:
    if isinstance(bits, np.ndarray):
        return bits.view(np.float32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
