"""The running requests and their slots: starting, leaving, being put back. Owned by `Scheduler`; used by its parts.

The running are kept in the order in which they share a step's tokens: most urgent first, as if they still waited. Their
keys stand still while they run, so nothing is sorted from step to step.
"""

from bisect import insort

from scheduler.config import SchedulerConfig
from scheduler.decisions import Decision, DecisionKind, DecisionLog
from scheduler.errors import InvariantError
from scheduler.pages import PagePool
from scheduler.policies.base import Policy
from scheduler.queues import WaitingQueue
from scheduler.request import Request, RequestStatus


class RunningSet:
    """Owns the list of running requests and the free slots. `start`, `leave` and `put_back` mutate; nothing blocks.

    No more requests run than a step has tokens, so that every running request can have one in every step.
    """

    def __init__(
        self, config: SchedulerConfig, pages: PagePool, policy: Policy, waiting: WaitingQueue, log: DecisionLog | None
    ):
        self.max_size = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.requests: list[Request] = []
        self.free_slots = list(range(self.max_size - 1, -1, -1))
        self.preempted: list[str] = []
        self.num_preemptions = 0
        self._pages = pages
        self._order = policy.order
        self._eviction = policy.eviction
        self._charge = policy.charge
        self._waiting = waiting
        self._log = log

    def __len__(self) -> int:
        return len(self.requests)

    def urgency(self, newcomer: Request) -> tuple[float, int]:
        """Where a waiting request would stand among the running, the least first."""
        return (self._order.running_key(newcomer), newcomer.sequence)

    def start(self, request: Request, page_ids: list[int], num_cached_tokens: int) -> None:
        """Give a request that has left the queue a slot and its pages. The pages' references are the request's now."""
        request.page_ids = page_ids
        request.slot = self.free_slots.pop()
        request.num_computed_tokens = num_cached_tokens
        request.status = RequestStatus.RUNNING
        request.running_key = self._order.running_key(request)
        insort(self.requests, request, key=place)

    def leave(self, request: Request) -> None:
        """Take a request off its slot and let go of its pages."""
        if request.slot is None:
            raise InvariantError(f"{request.request_id} does not run")
        self.requests.remove(request)
        self._pages.release(request.page_ids, request.last_step)
        request.page_ids = []
        request.page_ids_snapshot = ()
        self.free_slots.append(request.slot)
        request.slot = None

    def put_back(self, victim: Request, now: float, reason: str, by: str | None) -> None:
        """Preempt: forget what is computed, keep what was said, and wait again. Results in flight become stale.

        `reason` and `by` (the request that needs the room) are for the log of decisions.
        """
        if self._log is not None:
            self._log.record(victim.request_id, Decision(now, DecisionKind.PUT_BACK, reason, by))
        self.leave(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.attempt += 1
        victim.num_preemptions += 1
        victim.num_lost_tokens += victim.num_computed_tokens
        victim.num_computed_tokens = 0
        victim.num_pending_tokens = 0
        victim.last_step = 0
        victim.queued_at += now - victim.admitted_at
        self.num_preemptions += 1
        self.preempted.append(victim.request_id)
        if self._charge is not None:
            self._charge.on_put_back(victim, now)
        self._waiting.push(victim)

    def reserve_growth(self, now: float) -> None:
        """Give every running request the page for its next token, the most urgent first.

        When no page is left, the one of lowest given priority, and of those the latest, is put back; that may be the
        one that asks. A request that started because it had aged to the asker's priority is spared. This comes before
        any row is built, so no planned row is ever taken back.
        """
        size = self._pages.page_size
        short = [request for request in self.requests if len(request.page_ids) * size <= request.num_computed_tokens]
        for request in short:
            while request.status is RequestStatus.RUNNING and wanted_tokens(request):
                if self._pages.num_available:
                    request.page_ids.extend(self._pages.allocate(1))
                    break
                if self._pages.num_quarantined:
                    break  # a page comes back when the step in flight ends; nobody is put back for that
                victim = self._victim_for(request)
                by = None if victim is request else request.request_id
                self.put_back(victim, now, "the pool had no page left for the next token of a running request", by)

    def _victim_for(self, asker: Request) -> Request:
        for request in sorted(self.requests, key=self._eviction.eviction_key, reverse=True):
            if request is asker or not self._eviction.is_spared(request, asker):
                return request
        raise InvariantError(f"{asker.request_id} asks for a page but does not run")


def place(request: Request) -> tuple[float, int]:
    """The order of the running, the least first."""
    return (request.running_key, request.sequence)


def wanted_tokens(request: Request) -> int:
    """Tokens that a running request could compute now; 0 when the token that is pending will be its last."""
    pending = request.num_pending_tokens
    num_outputs = len(request.output_token_ids)
    if pending and num_outputs + pending >= request.max_new_tokens:
        return 0
    return len(request.prompt_token_ids) + num_outputs + pending - request.num_computed_tokens
