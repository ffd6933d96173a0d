"""From a step's fetched arrays to the scheduler's `RowResult`s. Called by `model/runner.py`."""

from dataclasses import dataclass

from model.sampler import Logprobs
from model.sampling import SamplingParams, TokenLogprobs
from scheduler.plan import PlannedRow, RowResult, StepPlan


@dataclass(frozen=True, slots=True)
class Fetched:
    """A step's outputs on the host; logprobs are numpy, or None where no row wants them."""

    token_ids: list[int]
    finite: list[bool]
    output_logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Logprobs of prompt positions start, start+1, …; a resumed request may send a piece again."""

    start: int
    entries: tuple[TokenLogprobs, ...]


def row_results(plan: StepPlan, fetched: Fetched, vocab_size: int) -> tuple[RowResult, ...]:
    """One result per row, in the plan's order. A row whose logits are not finite fails alone."""
    results = []
    start = 0
    for index, row in enumerate(plan.rows):
        results.append(_row_result(row, index, start, fetched, vocab_size))
        start += len(row.token_ids)
    return tuple(results)


def _row_result(row: PlannedRow, index: int, start: int, fetched: Fetched, vocab_size: int) -> RowResult:
    params = row.sampling
    assert isinstance(params, SamplingParams)
    prompt = None
    if fetched.prompt_logprobs is not None and params.prompt_logprobs is not None:
        known = row.next_token_ids
        entries = tuple(
            _token_logprobs(token_id, start + i, fetched.prompt_logprobs, params.prompt_logprobs, vocab_size)
            for i, token_id in enumerate(known)
        )
        prompt = PromptPiece(row.token_start + 1, entries)
    if not row.samples:
        return RowResult(None, prompt_logprobs=prompt)
    if not fetched.finite[index]:
        return RowResult(None, error="the model produced numbers that are not finite for this request")
    token_id = fetched.token_ids[index]
    logprobs = None
    if params.logprobs is not None and fetched.output_logprobs is not None:
        logprobs = _token_logprobs(token_id, index, fetched.output_logprobs, params.logprobs, vocab_size)
    return RowResult(token_id, logprobs=logprobs, prompt_logprobs=prompt)


def _token_logprobs(token_id: int, position: int, values: Logprobs, count: int, vocab_size: int) -> TokenLogprobs:
    count = min(count, vocab_size)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(values.chosen[position]),
        top_ids=tuple(values.top_ids[position, :count].tolist()),
        top_logprobs=tuple(values.top_logprobs[position, :count].tolist()),
    )
