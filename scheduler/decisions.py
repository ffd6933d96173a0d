"""The log of decisions about requests, and what it says about one of them. Filled by a `Scheduler` that has a log.

The server shows it at `GET /admin/scheduler/requests/{id}`, a simulation can print it. Without a log nothing is kept.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from scheduler.request import Request, RequestStatus

# Of those before a request, so many are named.
NUM_AHEAD = 5


class DecisionKind(StrEnum):
    """What was decided."""

    QUEUED = "queued"
    STARTED = "started"
    PUT_BACK = "put_back"
    ENDED = "ended"


class Decision(NamedTuple):
    """One decision about one request.

    Attributes:
        time: on the scheduler's clock. kind: see `DecisionKind`. reason: one sentence.
        by: the request that it was for, where one request had to make room for another; else None.
    """

    time: float
    kind: DecisionKind
    reason: str
    by: str | None = None


class Obstacle(NamedTuple):
    """Why the request at the head of the queue did not start in the last plan that looked at it."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request is where it is.

    Attributes:
        request_id, status: `waiting`, `preempted`, `running` or `finished`. summary: the answer in a sentence or two.
        priority, waited_secs: given priority (None once it has ended), and time spent waiting in all.
        position: place in the queue, 1 goes next; None when it does not wait. num_waiting: length of the queue.
        ahead: ids of the first few before it. obstacle: why the head of the queue does not start, if it does not.
        num_computed_tokens, num_output_tokens, num_pages, num_preemptions: progress.
        decisions: the latest decisions, in order; those before are forgotten.
    """

    request_id: str
    status: str
    summary: str
    priority: float | None
    waited_secs: float
    position: int | None
    num_waiting: int
    ahead: tuple[str, ...]
    obstacle: str | None
    num_computed_tokens: int
    num_output_tokens: int
    num_pages: int
    num_preemptions: int
    decisions: tuple[Decision, ...]


class DecisionLog:
    """Bounded: the last `per_request` decisions of every live request, and of the last `num_ended` that ended.

    `record` mutates; nothing blocks or raises.
    """

    def __init__(self, per_request: int = 32, num_ended: int = 1000):
        self._per_request = per_request
        self._num_ended = num_ended
        self._live: dict[str, deque[Decision]] = {}
        self._ended: OrderedDict[str, tuple[Decision, ...]] = OrderedDict()

    def record(self, request_id: str, decision: Decision) -> None:
        """Add a decision; `ENDED` moves the request to those that ended."""
        decisions = self._live.setdefault(request_id, deque(maxlen=self._per_request))
        decisions.append(decision)
        if decision.kind is DecisionKind.ENDED:
            del self._live[request_id]
            self._ended[request_id] = tuple(decisions)
            self._ended.move_to_end(request_id)
            while len(self._ended) > self._num_ended:
                self._ended.popitem(last=False)

    def decisions(self, request_id: str) -> tuple[Decision, ...]:
        """What was decided about a request, oldest first; empty if nothing is known of it."""
        return tuple(self._live.get(request_id, ())) or self._ended.get(request_id, ())


def summarise(request: Request, ahead: int, obstacle: Obstacle | None, last: Decision | None) -> str:
    """The answer in words."""
    if request.status is RequestStatus.RUNNING:
        return f"It is running, with {len(request.page_ids)} pages and {len(request.output_token_ids)} output tokens."
    put_back = ""
    if last is not None and last.kind is DecisionKind.PUT_BACK:
        put_back = f"It was put back: {last.reason}. "
    if obstacle is not None and obstacle.request_id == request.request_id:
        return f"{put_back}It is the next to start, and cannot yet: {obstacle.reason}."
    if obstacle is not None:
        return f"{put_back}{ahead} go before it; the first of them cannot start yet: {obstacle.reason}."
    return f"{put_back}{ahead} go before it; it has not been looked at yet."


def explain_ended(request_id: str, decisions: tuple[Decision, ...]) -> Explanation:
    """What the log still knows of a request that has ended."""
    waited = 0.0
    for earlier, later in pairwise(decisions):
        if earlier.kind in (DecisionKind.QUEUED, DecisionKind.PUT_BACK):
            waited += later.time - earlier.time
    return Explanation(
        request_id=request_id,
        status=RequestStatus.FINISHED.name.lower(),
        summary=f"It has ended: {decisions[-1].reason}.",
        priority=None,
        waited_secs=waited,
        position=None,
        num_waiting=0,
        ahead=(),
        obstacle=None,
        num_computed_tokens=0,
        num_output_tokens=0,
        num_pages=0,
        num_preemptions=sum(decision.kind is DecisionKind.PUT_BACK for decision in decisions),
        decisions=decisions,
    )
