"""What a policy is made of: an order of the waiting, a rule for making room, a capacity rule, and what to charge.

Each part has defaults here that amount to first come, first served; a policy replaces the parts that it is about and
`Policy` puts them together. `Scheduler` calls them, from one thread, and passes the time in: parts must not look at a
clock, sleep, or draw from a global random generator. They may keep state of their own, and must never change a request.
docs/policies.md is the tutorial.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.queues import HeapQueue, WaitingQueue
from scheduler.request import Request


class Order:
    """Who goes next. Overriding `waiting_key` alone gives an order by a fixed key; equal keys go by arrival."""

    def waiting_key(self, request: Request) -> float:
        """The least goes first. Must stand still while the request waits; time may enter as `request.queued_at`.

        To age linearly, subtract nothing from the others: all the waiting age alike, so a key of
        `base + rate · request.queued_at` is a fixed way to write `base − rate · (time waited)`.
        """
        return 0.0

    def running_key(self, request: Request) -> float:
        """Order in which the running share a step's tokens, the least first. Asked once, when the request starts."""
        return self.waiting_key(request)

    def make_queue(self) -> WaitingQueue:
        """The queue that keeps this order; called once, by the scheduler."""
        return HeapQueue(self.waiting_key)

    def attach(self, num_cached_tokens: Callable[[Request], int]) -> None:
        """Called once before the first request: a way to ask how many of a prompt's tokens the prefix cache holds."""


class Eviction(Protocol):
    """Who makes room. Pure: nothing here mutates, blocks or raises."""

    evicts: bool
    """Whether `may_evict` can ever be true; where it cannot, it is not asked."""

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """Order among the running when pages are short: the greatest is put back first."""

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Whether `running` may be put back so that `newcomer` can start.

        Must be irreflexive and without cycles over the life of two requests, else they put each other back for ever.
        """

    def is_spared(self, running: Request, other: Request) -> bool:
        """Whether `other`, which runs too and needs a page, may not take it from `running`."""


class LatestFirst:
    """Nobody makes room for a newcomer; when pages run out, who came last is put back."""

    evicts = False

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """The latest arrival is the greatest."""
        return (0.0, request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Never."""
        return False

    def is_spared(self, running: Request, other: Request) -> bool:
        """Never."""
        return False


class Capacity(Protocol):
    """Whom to admit, given the pages. Pure."""

    def fits(self, spare: int, head: Request, others: Sequence[Request], page_size: int) -> bool:
        """Whether `spare` pages, left when `head` has those for all tokens it knows, are enough beside `others`.

        May answer at once where that is cheap; otherwise `spare >= headroom(…)`.
        """

    def headroom(self, head: Request, others: Sequence[Request], page_size: int) -> int:
        """Pages that must be left. `others` are the running whom `head` may not put back."""


class Charge:
    """What has been served, for policies that keep accounts. Every method may mutate the policy's own state."""

    def on_arrival(self, request: Request, now: float) -> None:
        """A request was added."""

    def on_start(self, request: Request, now: float) -> None:
        """It has a slot and pages now; `request.num_computed_tokens` of its tokens came from the cache."""

    def on_computed(self, request: Request, num_tokens: int, drew: bool) -> None:
        """A step is done: so many of its tokens were computed, and maybe one was drawn."""

    def on_put_back(self, request: Request, now: float) -> None:
        """It was preempted, and will be pushed to the queue right after this."""

    def on_end(self, request: Request) -> None:
        """It ended, for whatever reason."""


class KnownTokens:
    """Pages for every known token, and one more for each of the running that will grow (as vLLM does, with a margin).

    The pool is used to the full, at the price of preemptions when many requests grow at once.
    """

    def fits(self, spare: int, head: Request, others: Sequence[Request], page_size: int) -> bool:
        """A page for each of the others is always enough."""
        return spare >= len(others) or spare >= self.headroom(head, others, page_size)

    def headroom(self, head: Request, others: Sequence[Request], page_size: int) -> int:
        """A page for each that may grow: without it the next step would put `head` back, all its work lost."""
        return sum(final_length(request) > len(request.page_ids) * page_size for request in others)


class ReserveToCompletion:
    """Pages for all that anybody running may ever need (TensorRT-LLM's GUARANTEED_NO_EVICT).

    Nobody is ever put back for want of pages; requests that end early leave what they reserved unused.
    """

    def fits(self, spare: int, head: Request, others: Sequence[Request], page_size: int) -> bool:
        """All of it must be there."""
        return spare >= self.headroom(head, others, page_size)

    def headroom(self, head: Request, others: Sequence[Request], page_size: int) -> int:
        """What the others may still need, and `head` beyond its known tokens."""
        growth = max(0, -(-final_length(head) // page_size) - -(-head.num_known_tokens // page_size))
        for request in others:
            growth += max(0, -(-final_length(request) // page_size) - len(request.page_ids))
        return growth


CAPACITIES: dict[str, Callable[[], Capacity]] = {
    "known_tokens": KnownTokens,
    "reserve_to_completion": ReserveToCompletion,
}


def final_length(request: Request) -> int:
    """Positions whose KV a request may ever need: the last token drawn needs none."""
    return len(request.prompt_token_ids) + max(request.max_new_tokens - 1, 0)


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy. Frozen; its parts may keep accounts, so one object belongs to one scheduler.

    Attributes:
        name: what a configuration calls it.
        order, eviction, capacity: see the classes of these names.
        charge: told of everything that is served; None for policies that keep no accounts.
        paper: where the idea is published, for reports.
    """

    name: str
    order: Order = field(default_factory=Order)
    eviction: Eviction = field(default_factory=LatestFirst)
    capacity: Capacity = field(default_factory=KnownTokens)
    charge: Charge | None = None
    paper: str = ""
