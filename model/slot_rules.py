"""The host's copy of each slot's sampling rules and page table, kept as arrays so that a step is filled by indexing.

Owned and called by `model/runner.py`. A slot is rewritten when a request starts (or resumes) in it.
"""

import numpy as np

from model.sampler import GREEDY_TEMPERATURE
from model.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from model.staging import RowField, RowFloat, Scalar, StepFields
from scheduler.plan import PlannedRow, StepPlan

BIAS_ENTRIES = 1024

_INTS = (RowField.SEED_HIGH, RowField.SEED_LOW, RowField.CHOICE, RowField.TOP_K, RowField.ADJUSTED)


class SlotRules:
    """Rules of S slots, M pages each. Mutated by `start` and `fill`; one thread."""

    def __init__(self, num_slots: int, max_pages: int, vocab_size: int):
        self._vocab_size = vocab_size
        self._ints = np.zeros((len(_INTS), num_slots), np.int32)
        self._floats = np.zeros((len(RowFloat), num_slots), np.float32)
        self._min_tokens = np.zeros(num_slots, np.int32)
        self._sampled = np.zeros(num_slots, bool)
        self._stops = np.full((num_slots, MAX_STOP_TOKEN_IDS), vocab_size, np.int32)
        self._page_table = np.zeros((num_slots, max_pages), np.int32)
        self._page_ids: list[tuple[int, ...]] = [()] * num_slots

    def start(self, row: PlannedRow) -> tuple[np.ndarray, ...] | None:
        """Take over a slot for a request.

        Returns what rebuilds the slot's device state, (prompt ids, output ids, bias ids, biases), or None if the
        request has no penalty, bias or mask, and so never reads that state.
        """
        params, slot = _params(row), row.slot
        adjusted = bool(
            params.logit_bias
            or params.min_tokens
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )
        seed = params.seed
        top_k = min(max(params.top_k, 0), self._vocab_size)
        self._ints[:, slot] = (_signed(seed >> 32), _signed(seed & 0xFFFFFFFF), params.choice, top_k, adjusted)
        self._floats[:, slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        self._min_tokens[slot] = params.min_tokens
        self._sampled[slot] = params.temperature >= GREEDY_TEMPERATURE
        self._stops[slot] = self._vocab_size
        self._stops[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        if not adjusted:
            return None
        return (
            np.asarray(row.prompt_token_ids, np.int32),
            np.asarray(row.output_token_ids, np.int32),
            np.asarray([token_id for token_id, _ in params.logit_bias], np.int32),
            np.asarray([bias for _, bias in params.logit_bias], np.float32),
        )

    def padded(self, arrays: tuple[np.ndarray, ...], max_model_len: int) -> tuple[np.ndarray, ...]:
        """The arrays of `start` at their fixed lengths; ids past the vocabulary are dropped on the device."""
        prompt, output, bias_ids, biases = arrays
        return (
            _pad(prompt, max_model_len, self._vocab_size),
            _pad(output, max_model_len, self._vocab_size),
            _pad(bias_ids, BIAS_ENTRIES, self._vocab_size),
            _pad(biases, BIAS_ENTRIES, 0),
        )

    def fill(self, plan: StepPlan, slots: np.ndarray, fields: StepFields) -> None:
        """Write rules, page tables and step-wide flags of a plan's rows (slots [rows]) into a buffer's fields."""
        count = len(plan.rows)
        for row in plan.rows:
            if self._page_ids[row.slot] is not row.page_ids:
                self._page_ids[row.slot] = row.page_ids
                self._page_table[row.slot, : len(row.page_ids)] = row.page_ids
                self._page_table[row.slot, len(row.page_ids) :] = 0
        fields.page_table[:count] = self._page_table[slots]
        fields.rows[list(_INTS), :count] = self._ints[:, slots]
        fields.row_floats[:, :count] = self._floats[:, slots]
        fields.row_floats[RowFloat.REPETITION, count:] = 1.0
        outputs = np.fromiter((row.num_output_tokens for row in plan.rows), np.int32, count)
        fields.rows[RowField.STOPS_MASKED, :count] = outputs < self._min_tokens[slots]
        adjusted = fields.rows[RowField.ADJUSTED, :count].any()
        if adjusted:
            fields.stop_token_ids[:count] = self._stops[slots]
        scalars = fields.scalars
        scalars[Scalar.ANY_ADJUSTED] = adjusted
        scalars[Scalar.ANY_SAMPLED] = self._sampled[slots].any()
        scalars[Scalar.ANY_LOGPROBS] = any(self.wants_logprobs(row) for row in plan.rows)
        scalars[Scalar.ANY_PROMPT_LOGPROBS] = any(self.wants_prompt_logprobs(row) for row in plan.rows)

    @staticmethod
    def wants_logprobs(row: PlannedRow) -> bool:
        """Whether this row's drawn token must come with logprobs."""
        return row.samples and _params(row).logprobs is not None

    @staticmethod
    def wants_prompt_logprobs(row: PlannedRow) -> bool:
        """Whether this row's prompt positions must come with logprobs."""
        return _params(row).prompt_logprobs is not None and row.token_start < row.num_prompt_tokens


def _params(row: PlannedRow) -> SamplingParams:
    params = row.sampling
    if not isinstance(params, SamplingParams):
        raise TypeError(f"request {row.request_id} carries no SamplingParams but {type(params).__name__}")
    return params


def _signed(word: int) -> int:
    """A 32-bit word as int32 holds it."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _pad(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    result = np.full(length, fill, values.dtype)
    result[: len(values)] = values
    return result
