"""From the running requests to the rows of a step: who gets how many of its tokens. Used by `Scheduler.plan` alone."""

from scheduler.errors import InvariantError
from scheduler.plan import PlannedRow
from scheduler.request import Request
from scheduler.running import RunningSet, wanted_tokens

_SAMPLED_ON_DEVICE = (0,)


def build_rows(running: RunningSet, budget: int, step_id: int, page_size: int) -> tuple[PlannedRow, ...]:
    """Hand out `budget` tokens: one to each request that wants one, the rest to prompts, the most urgent first.

    Mutates the requests: their tokens count as computed from here on. A request whose next page has not come back yet
    gets no row. Rows of one token that sample come first.
    """
    decodes: list[PlannedRow] = []
    others: list[PlannedRow] = []
    chunks = []
    for request in running.requests:
        wants = wanted_tokens(request)
        if not wants or len(request.page_ids) * page_size <= request.num_computed_tokens:
            continue
        if wants > 1:
            chunks.append(request)
            continue
        row = _row(request, 1, step_id)
        (decodes if row.samples else others).append(row)
    budget -= len(decodes) + len(others)
    for request in chunks:
        if budget <= 0:
            break
        count = min(wanted_tokens(request), budget)
        budget -= count
        others.append(_row(request, count, step_id))
    return (*decodes, *others)


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
    # By position: this is the hottest constructor of the scheduler, and keywords cost a quarter more.
    return PlannedRow(
        request.request_id,
        request.attempt,
        request.slot,
        starts,
        start,
        _SAMPLED_ON_DEVICE if start == num_known else request.tokens(start, end),
        start == num_known,  # feeds_sampled
        request.page_ids_snapshot,
        samples,
        len(prompt),
        len(outputs) + pending,
        tuple(prompt) if starts else (),
        tuple(outputs) if starts else (),
        () if start >= len(prompt) else tuple(prompt[start + 1 : end + 1]),
        request.sampling,
    )
