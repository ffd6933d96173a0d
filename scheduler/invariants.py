"""What must hold between a scheduler's parts at any moment. Called by `Scheduler.check`."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from scheduler.config import SchedulerConfig
from scheduler.errors import InvariantError
from scheduler.pages import PagePool
from scheduler.queues import WaitingQueue
from scheduler.request import Request, RequestStatus
from scheduler.running import RunningSet, place


def check_scheduler(
    config: SchedulerConfig,
    pages: PagePool,
    requests: Mapping[str, Request],
    waiting: WaitingQueue,
    running: RunningSet,
) -> None:
    """Raise InvariantError unless requests, queue, slots and page references agree."""
    pages.check()
    waiting.check()
    if len(running) + len(waiting) != len(requests):
        raise InvariantError("a live request is neither waiting nor running, or both")
    for request in (*running.requests, *waiting):
        if requests.get(request.request_id) is not request:
            raise InvariantError(f"{request.request_id} runs or waits, but is not live")
    for request in running.requests:
        _check_running(config, request)
    for request in waiting:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            raise InvariantError(f"{request.request_id} waits but is {request.status.name}")
        if request.page_ids or request.slot is not None or request.num_pending_tokens or request.num_computed_tokens:
            raise InvariantError(f"{request.request_id} waits but has pages, a slot or computed tokens")
    if any(place(first) > place(second) for first, second in pairwise(running.requests)):
        raise InvariantError("the running are out of order")
    slots = sorted([*(request.slot for request in running.requests if request.slot is not None), *running.free_slots])
    if slots != list(range(running.max_size)):
        raise InvariantError("a slot is lost, or used twice")
    references = Counter(page for request in running.requests for page in request.page_ids)
    if dict(references) != pages.reference_counts():
        raise InvariantError("page references differ from what the running requests hold")


def _check_running(config: SchedulerConfig, request: Request) -> None:
    if request.status is not RequestStatus.RUNNING or request.slot is None:
        raise InvariantError(f"{request.request_id} runs but is {request.status.name}")
    if request.num_computed_tokens > len(request.page_ids) * config.page_size:
        raise InvariantError(f"{request.request_id} has computed more tokens than its pages hold")
    if request.num_computed_tokens > request.num_known_tokens + request.num_pending_tokens:
        raise InvariantError(f"{request.request_id} has computed tokens that nobody knows")
    if len(set(request.page_ids)) != len(request.page_ids):
        raise InvariantError(f"{request.request_id} holds a page twice")
    if request.num_registered_pages * config.page_size > request.num_computed_tokens:
        raise InvariantError(f"{request.request_id} has indexed pages that are not computed")
    if not 0 <= request.num_pending_tokens <= 2 or len(request.output_token_ids) > max(request.max_new_tokens, 0):
        raise InvariantError(f"{request.request_id} has too many tokens")
