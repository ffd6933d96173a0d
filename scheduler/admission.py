"""Who leaves the waiting queue, and who makes room. Used by `Scheduler.plan` alone.

A request starts when it has a slot and pages for all tokens it knows, so that two half-started prompts cannot block each
other. The head of the queue is never skipped for a smaller request behind it.
"""

from collections.abc import Callable

from scheduler.config import SchedulerConfig
from scheduler.pages import PagePool, chain_digest, root_digest
from scheduler.queues import QueuePolicy, WaitingQueue
from scheduler.request import Request, RequestStatus


class Admission:
    """Moves requests from waiting to running; owns the free slots. `admit` mutates, nothing blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PagePool,
        policy: QueuePolicy,
        waiting: WaitingQueue,
        running: list[Request],
        put_back: Callable[[Request], None],
    ):
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._config = config
        self._pages = pages
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._put_back = put_back

    def admit(self, now: float) -> None:
        """Start waiting requests in order until one does not fit, or would get no token in this step."""
        while (head := self._waiting.peek()) is not None:
            if self._budget_for(head) <= 0:
                return
            cached = self._cached_prefix(head)
            missing = self._num_pages(head) - len(cached)
            if not self._fits(head, cached, missing) and not self._make_room(head, cached, missing):
                return
            self._start(self._waiting.pop(), cached, missing, now)

    def extend_digests(self, request: Request, count: int) -> None:
        """Make sure that the chain digests of the request's first `count` full pages are known."""
        size = self._config.page_size
        digests = request.page_digests
        while len(digests) < count:
            parent = digests[-1] if digests else root_digest(request.cache_salt)
            start = len(digests) * size
            digests.append(chain_digest(parent, request.tokens(start, start + size)))

    def _budget_for(self, head: Request) -> int:
        """Tokens left for `head` when decoding requests have one each and more important ones all they want."""
        key = self._policy.running_key(head)
        budget = self._config.max_num_batched_tokens
        for request in self._running:
            wants = request.num_uncomputed_tokens
            budget -= wants if wants < 2 or self._policy.running_key(request) < key else 1
        return budget

    def _num_pages(self, request: Request) -> int:
        return -(-request.num_known_tokens // self._config.page_size)

    def _cached_prefix(self, request: Request) -> list[int]:
        """Pages of the longest cached prefix; at least one token is always left to compute."""
        if not (self._config.enable_prefix_reuse and request.read_prefix_cache):
            return []
        count = (request.num_known_tokens - 1) // self._config.page_size
        self.extend_digests(request, count)
        return self._pages.find(request.page_digests[:count])

    def _headroom(self, head: Request) -> int:
        """A page for each running request that `head` may not evict: else the next step would put `head` back."""
        return sum(not self._policy.may_evict(head, request) for request in self._running)

    def _fits(self, head: Request, cached: list[int], missing: int) -> bool:
        available = self._pages.num_available - self._pages.num_cached(cached)
        return bool(self.free_slots) and missing + self._headroom(head) <= available

    def _make_room(self, head: Request, cached: list[int], missing: int) -> bool:
        """Put back as few less important requests as let `head` run; none if that is not enough.

        Returns whether `head` fits now. Pages that a step in flight may touch come back only when it ends, so that
        `head` may have to wait for the next plan.
        """
        evictable = [request for request in self._running if self._policy.may_evict(head, request)]
        if not evictable:
            return False
        evictable.sort(key=self._policy.running_key)
        wanted = missing + self._headroom(head)
        pages = self._pages.num_available + self._pages.num_quarantined - self._pages.num_cached(cached)
        slots = len(self.free_slots)
        victims: list[Request] = []
        kept = set(cached)
        while (slots < 1 or pages < wanted) and evictable:
            victim = evictable.pop()
            victims.append(victim)
            slots += 1
            pages += sum(self._pages.num_references(page) == 1 and page not in kept for page in victim.page_ids)
        if slots < 1 or pages < wanted:
            return False
        for victim in victims:
            self._put_back(victim)
        return self._fits(head, cached, missing)

    def _start(self, request: Request, cached: list[int], missing: int, now: float) -> None:
        self._pages.share(cached)
        request.page_ids = cached + self._pages.allocate(missing)
        request.slot = self.free_slots.pop()
        num_cached = len(cached) * self._config.page_size
        request.num_computed_tokens = num_cached
        request.num_registered_pages = len(cached)
        request.admitted_at = now
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
            if self._config.enable_prefix_reuse and request.read_prefix_cache:
                self.num_queried_tokens += request.num_prompt_tokens
                self.num_hit_tokens += num_cached
        request.status = RequestStatus.RUNNING
        self._running.append(request)
