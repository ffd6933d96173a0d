"""What must hold between a scheduler's parts at any moment. Called by `Scheduler.check`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from scheduler.config import SchedulerConfig
from scheduler.errors import InvariantError
from scheduler.pages import PagePool
from scheduler.queues import WaitingQueue
from scheduler.request import Request, RequestStatus


def check_scheduler(
    config: SchedulerConfig,
    pages: PagePool,
    requests: Mapping[str, Request],
    waiting: WaitingQueue,
    running: Sequence[Request],
    free_slots: Sequence[int],
) -> None:
    """Raise InvariantError unless requests, slots and page references agree."""
    pages.check()
    if len(running) + len(waiting) != len(requests):
        raise InvariantError("a live request is neither waiting nor running, or both")
    for request in running:
        _check_running(config, request)
    for request in waiting:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.page_ids:
            raise InvariantError(f"{request.request_id} waits but is {request.status.name} or holds pages")
    slots = sorted([*(request.slot for request in running if request.slot is not None), *free_slots])
    if slots != list(range(config.max_num_seqs)):
        raise InvariantError("a slot is lost, or used twice")
    references = Counter(page for request in running for page in request.page_ids)
    if dict(references) != pages.reference_counts():
        raise InvariantError("page references differ from what the running requests hold")


def _check_running(config: SchedulerConfig, request: Request) -> None:
    if request.status is not RequestStatus.RUNNING or request.slot is None:
        raise InvariantError(f"{request.request_id} runs but is {request.status.name}")
    if request.num_computed_tokens > len(request.page_ids) * config.page_size:
        raise InvariantError(f"{request.request_id} has computed more tokens than its pages hold")
    if request.num_computed_tokens > request.num_known_tokens + request.num_pending_tokens:
        raise InvariantError(f"{request.request_id} has computed tokens that nobody knows")
    if not 0 <= request.num_pending_tokens <= 2 or len(request.output_token_ids) > max(request.max_new_tokens, 0):
        raise InvariantError(f"{request.request_id} has too many tokens")
