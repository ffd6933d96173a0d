"""Who leaves the waiting queue, and who makes room. Used by `Scheduler.plan` alone.

A request starts when it has a slot and pages for all tokens it knows, so that two half-started prompts cannot block
each other. The head of the queue is never skipped for a smaller request behind it.
"""

from scheduler.config import SchedulerConfig
from scheduler.decisions import Decision, DecisionKind, DecisionLog, Obstacle
from scheduler.pages import PagePool, chain_digest, root_digest
from scheduler.policies.base import Policy
from scheduler.queues import WaitingQueue
from scheduler.request import Request, RequestStatus
from scheduler.running import RunningSet, place, wanted_tokens

_NO_SLOT = "every slot is taken by a request that it may not put back"
_NO_TOKENS = "the step's token budget goes to requests that are more urgent"
_NO_PAGES = "too few pages are free for its tokens and the growth of those that run"


class Admission:
    """Moves requests from waiting to running. `admit` and `extend_digests` mutate; nothing blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PagePool,
        policy: Policy,
        waiting: WaitingQueue,
        running: RunningSet,
        log: DecisionLog | None,
    ):
        self.obstacle: Obstacle | None = None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._config = config
        self._pages = pages
        self._eviction = policy.eviction
        self._capacity = policy.capacity
        self._charge = policy.charge
        self._waiting = waiting
        self._running = running
        self._log = log

    def admit(self, now: float, budget: int) -> None:
        """Start waiting requests in order until one does not fit, or would get none of this step's `budget` tokens."""
        self.obstacle = None
        head = self._waiting.peek(now)
        if head is None:
            return
        if not self._can_have_slot(head):
            self._note(head, _NO_SLOT)
            return
        spare = budget - sum(map(wanted_tokens, self._running.requests))
        while head is not None:
            if head.request_id in self._running.preempted:
                return  # put back in this very plan; a policy in which two evict each other would go on for ever
            if not self._can_have_slot(head):
                self._note(head, _NO_SLOT)
                return
            if spare <= 0 and self._budget_for(head, budget) <= 0:
                self._note(head, _NO_TOKENS)
                return
            cached = self._cached_prefix(head)
            missing = -(-head.num_known_tokens // self._config.page_size) - len(cached)
            if not self._fits(head, cached, missing) and not self._make_room(head, cached, missing, now):
                self._note(head, _NO_PAGES)
                return
            self._start(head, cached, missing, now)
            spare -= wanted_tokens(head)
            head = self._waiting.peek(now)

    def extend_digests(self, request: Request, count: int) -> None:
        """Make sure that the chain digests of the request's first `count` full pages are known."""
        size = self._config.page_size
        digests = request.page_digests
        while len(digests) < count:
            parent = digests[-1] if digests else root_digest(request.cache_salt)
            start = len(digests) * size
            digests.append(chain_digest(parent, request.tokens(start, start + size)))

    def _can_have_slot(self, head: Request) -> bool:
        if self._running.free_slots:
            return True
        may_evict = self._eviction.may_evict
        return self._eviction.evicts and any(may_evict(head, request) for request in self._running.requests)

    def _budget_for(self, head: Request, budget: int) -> int:
        """Tokens left for `head` when the more urgent have all they want, and the others no more than one each."""
        urgency = self._running.urgency(head)
        for request in self._running.requests:
            if self._eviction.evicts and self._eviction.may_evict(head, request):
                continue  # `head` may have this one's place
            wants = wanted_tokens(request)
            budget -= wants if wants < 2 or place(request) < urgency else 1
        return budget

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        return len(self._cached_prefix(request)) * self._config.page_size

    def _cached_prefix(self, request: Request) -> list[int]:
        """Pages of the longest cached prefix; at least one token is always left to compute."""
        if not self._reads_cache(request):
            return []
        count = (request.num_known_tokens - 1) // self._config.page_size
        self.extend_digests(request, count)
        return self._pages.find(request.page_digests[:count])

    def _reads_cache(self, request: Request) -> bool:
        return self._config.enable_prefix_reuse and request.read_prefix_cache

    def _others(self, head: Request) -> list[Request]:
        """The running whom `head` may not put back."""
        if not self._eviction.evicts:
            return self._running.requests
        may_evict = self._eviction.may_evict
        return [request for request in self._running.requests if not may_evict(head, request)]

    def _fits(self, head: Request, cached: list[int], missing: int) -> bool:
        spare = self._pages.num_available - self._pages.num_cached(cached) - missing
        if not self._running.free_slots or spare < 0:
            return False
        return self._capacity.fits(spare, head, self._others(head), self._config.page_size)

    def _make_room(self, head: Request, cached: list[int], missing: int, now: float) -> bool:
        """Put back as few less important requests as let `head` run; none if that is not enough.

        Returns whether `head` fits now. Pages that a step in flight may touch come back only when it ends, so that
        `head` may have to wait for the next plan.
        """
        if not self._eviction.evicts:
            return False
        evictable = [request for request in self._running.requests if self._eviction.may_evict(head, request)]
        slots = 1 - len(self._running.free_slots)
        pages = (
            missing
            + self._capacity.headroom(head, self._others(head), self._config.page_size)
            - (self._pages.num_available + self._pages.num_quarantined - self._pages.num_unheld(cached))
        )
        if not evictable or pages > sum(len(request.page_ids) for request in evictable):
            return False
        evictable.sort(key=self._eviction.eviction_key, reverse=True)
        victims = self._choose_victims(evictable, slots, pages, set(cached))
        for victim in victims:
            self._running.put_back(victim, now, "it made room for a more important request", head.request_id)
        return bool(victims) and self._fits(head, cached, missing)

    def _choose_victims(self, evictable: list[Request], slots: int, pages: int, kept: set[int]) -> list[Request]:
        """The first of `evictable` that free so many slots and pages, less those that prove not to be needed."""
        freed = _FreedPages(self._pages, kept)
        victims: list[Request] = []
        while len(victims) < slots or freed.count < pages:
            if len(victims) == len(evictable):
                return []
            victims.append(evictable[len(victims)])
            freed.add(victims[-1])
        for victim in victims[::-1]:
            freed.remove(victim)
            if len(victims) - 1 >= slots and freed.count >= pages:
                victims.remove(victim)
            else:
                freed.add(victim)
        return victims

    def _start(self, request: Request, cached: list[int], missing: int, now: float) -> None:
        request.admitted_key = self._waiting.key()
        request.admitted_at = now
        if request.first_started_at is None:
            request.first_started_at = now
        # By id: a victim put back just now may stand level with `request`.
        self._waiting.remove(request.request_id)
        num_cached = len(cached) * self._config.page_size
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
            if self._reads_cache(request):
                self.num_queried_tokens += request.num_prompt_tokens
                self.num_hit_tokens += num_cached
        self._pages.share(cached)
        request.num_registered_pages = len(cached)
        if self._config.enable_prefix_reuse:
            request.next_registration = (len(cached) + 1) * self._config.page_size
        computed = num_cached
        if request.status is RequestStatus.WAITING:
            computed = max(num_cached, min(request.num_transferred_tokens, request.num_known_tokens - 1))
        else:
            request.num_lost_tokens -= num_cached
        self._running.start(request, cached + self._pages.allocate(missing), computed)
        if self._charge is not None:
            self._charge.on_start(request, now)
        if self._log is not None:
            reason = f"slot {request.slot}, {len(request.page_ids)} pages, {computed} tokens found in the cache"
            self._log.record(request.request_id, Decision(now, DecisionKind.STARTED, reason))

    def _note(self, head: Request, reason: str) -> None:
        if self._log is not None:
            self.obstacle = Obstacle(head.request_id, reason)


class _FreedPages:
    """Counts the pages that nobody would hold any more if some requests were put back. Changes nothing."""

    def __init__(self, pages: PagePool, kept: set[int]):
        self.count = 0
        self._pages = pages
        self._kept = kept
        self._claims: dict[int, int] = {}

    def add(self, victim: Request) -> None:
        """Count what else comes free with `victim`; pages shared among victims only do with the last of them."""
        for page in victim.page_ids:
            self._claims[page] = self._claims.get(page, 0) + 1
            self.count += self._is_free(page)

    def remove(self, victim: Request) -> None:
        """Undo `add`."""
        for page in victim.page_ids:
            self.count -= self._is_free(page)
            self._claims[page] -= 1

    def _is_free(self, page: int) -> bool:
        return page not in self._kept and self._claims[page] == self._pages.num_references(page)
