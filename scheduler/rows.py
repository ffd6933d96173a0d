"""From the running requests to the rows of a step: who gets how many of its tokens. Used by `Scheduler.plan` alone."""

from scheduler.errors import InvariantError
from scheduler.plan import PlannedRow
from scheduler.policies.base import Eviction
from scheduler.request import Request
from scheduler.running import RunningSet, wanted_tokens

# By how much prompts of less urgent requests may lengthen a step that computes the prompt of a more urgent one.
LESS_URGENT_SHARE = 0.25

_SAMPLED_ON_DEVICE = (0,)
# Half the time of calling the class.
_new_tuple = tuple.__new__


def build_rows(
    running: RunningSet, eviction: Eviction, budget: int, step_id: int, page_size: int
) -> tuple[PlannedRow, ...]:
    """Hand out `budget` tokens: one to each request that wants one, the rest to prompts, the most urgent first.

    Where a prompt belongs to a request that may take the place of others, the prompts of those others share a small
    part of the step: everybody in a step waits for its end, and the urgent one should not wait for theirs.

    Mutates the requests: their tokens count as computed from here on. A request whose next page has not come back yet
    gets no row. Rows of one token that sample come first.
    """
    decodes: list[PlannedRow] = []
    others: list[PlannedRow] = []
    chunks = []
    # Every running request comes by here in every step, so this loop is written out and asks for as little as it can.
    for request in running.requests:
        start = request.num_computed_tokens
        pending = request.num_pending_tokens
        num_outputs = len(request.output_token_ids) + pending
        num_prompt = len(request.prompt_token_ids)
        if pending and num_outputs >= request.max_new_tokens:
            continue  # the token that is pending will be its last
        if len(request.page_ids) * page_size <= start:
            continue
        wants = num_prompt + num_outputs - start
        if wants > 1:
            chunks.append(request)
        elif wants and (request.last_step == 0 or start < num_prompt):
            row = _row(request, 1, step_id)
            (decodes if row[8] else others).append(row)  # 8: `samples`
        elif wants:
            request.last_step = step_id
            request.num_computed_tokens = start + 1
            request.num_pending_tokens = pending + 1
            pages = request.page_ids_snapshot
            if len(pages) != len(request.page_ids):
                pages = request.page_ids_snapshot = tuple(request.page_ids)
            values = (
                request.request_id,
                request.attempt,
                request.slot,
                False,  # starts
                start,
                _SAMPLED_ON_DEVICE if pending else (request.output_token_ids[-1],),
                pending > 0,  # feeds_sampled
                pages,
                True,  # samples
                num_prompt,
                num_outputs,
                (),
                (),
                (),
                request.sampling,
            )
            decodes.append(_new_tuple(PlannedRow, values))
    num_singles = len(decodes) + len(others)
    for request, count in _deal(chunks, eviction, num_singles, budget - num_singles):
        others.append(_row(request, count, step_id))
    return (*decodes, *others)


def _deal(chunks: list[Request], eviction: Eviction, num_singles: int, budget: int) -> list[tuple[Request, int]]:
    """Who of `chunks`, the most urgent first, gets how many of `budget` tokens, in a step of `num_singles` others."""
    less_urgent: list[Request] = []
    if eviction.evicts and len(chunks) > 1:
        first = min(chunks, key=eviction.eviction_key)
        less_urgent = [request for request in chunks if eviction.may_evict(first, request)]
    if not less_urgent:
        return _deal_in_order(chunks, budget)
    urgent = _deal_in_order([request for request in chunks if request not in less_urgent], budget)
    num_urgent = sum(count for _, count in urgent)
    share = max(1, int(LESS_URGENT_SHARE * (num_singles + num_urgent)))
    return urgent + _deal_in_order(less_urgent, min(share, budget - num_urgent))


def _deal_in_order(chunks: list[Request], budget: int) -> list[tuple[Request, int]]:
    dealt = []
    for request in chunks:
        if budget <= 0:
            break
        count = min(wanted_tokens(request), budget)
        budget -= count
        dealt.append((request, count))
    return dealt


def _row(request: Request, count: int, step_id: int) -> PlannedRow:
    prompt = request.prompt_token_ids
    outputs = request.output_token_ids
    pending = request.num_pending_tokens
    start = request.num_computed_tokens
    end = start + count
    num_known = len(prompt) + len(outputs)
    samples = end == num_known + pending and request.max_new_tokens > 0
    starts = request.last_step == 0
    request.last_step = step_id
    request.num_computed_tokens = end
    if samples:
        request.num_pending_tokens = pending + 1
    if len(request.page_ids_snapshot) != len(request.page_ids):
        request.page_ids_snapshot = tuple(request.page_ids)
    if request.slot is None:
        raise InvariantError(f"{request.request_id} runs without a slot")
    return PlannedRow(
        request_id=request.request_id,
        attempt=request.attempt,
        slot=request.slot,
        starts=starts,
        token_start=start,
        token_ids=_SAMPLED_ON_DEVICE if start == num_known else request.tokens(start, end),
        feeds_sampled=start == num_known,
        page_ids=request.page_ids_snapshot,
        samples=samples,
        num_prompt_tokens=len(prompt),
        num_output_tokens=len(outputs) + pending,
        prompt_token_ids=tuple(prompt) if starts else (),
        output_token_ids=tuple(outputs) if starts else (),
        next_token_ids=() if start >= len(prompt) else tuple(prompt[start + 1 : end + 1]),
        sampling=request.sampling,
    )
