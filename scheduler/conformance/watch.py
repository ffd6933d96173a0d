"""A policy with a watch on it: each of its parts is wrapped, and what it does is noted. Used by `Player`.

The watch sees who starts and who is put back for whom, stops a plan that would never end, and, where it is told to,
compares every request before and after every call of the policy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from scheduler.policies.base import Capacity, Charge, Eviction, Order, Policy
from scheduler.queues import WaitingQueue
from scheduler.request import Request

# `page_digests` grow when a policy asks what the cache holds: that is the scheduler's own memory.
_FIELDS = tuple(field.name for field in fields(Request) if field.name != "page_digests")


class Violation(Exception):
    """A policy broke a property. The message says in words what it did."""


@dataclass(frozen=True, slots=True)
class PutBack:
    """A request was put back; `newcomer` is who came in, None if a running request needed a page."""

    request_id: str
    newcomer: str | None


class Watch:
    """What is noted of one policy in one run. Written by the wrapped parts and by `Player`.

    Attributes:
        requests: the live requests by id, kept by `Player`.
        compares: whether to compare requests before and after each call.
        queue: the policy's queue, once the scheduler has made it.
        started, put_back: what happened in the plan that is being made, or was made last.
    """

    def __init__(self, compares: bool):
        self.requests: dict[str, Request] = {}
        self.compares = compares
        self.queue: WaitingQueue | None = None
        self.started: list[str] = []
        self.put_back: list[PutBack] = []
        self._newcomer: str | None = None

    def begin_plan(self) -> None:
        """A plan is about to be made."""
        self.started.clear()
        self.put_back.clear()
        self._newcomer = None

    def note_newcomer(self, request: Request) -> None:
        """The policy is asked whether others make room for this one."""
        self._newcomer = request.request_id

    def note_put_back(self, request: Request) -> None:
        """Raises Violation once a plan puts back more often than it could if it were ever to end."""
        self.put_back.append(PutBack(request.request_id, self._newcomer))
        if len(self.put_back) > 20 + 4 * len(self.requests):
            names = sorted({entry.request_id for entry in self.put_back})
            raise Violation(
                f"planning one step never ends: {', '.join(names)} put each other back again and again; "
                "`may_evict` must be without cycles"
            )

    def call[**P, R](self, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the policy. Raises Violation if that changed a request."""
        if not self.compares:
            return function(*args, **kwargs)
        before = {name: _snapshot(request) for name, request in self.requests.items()}
        result = function(*args, **kwargs)
        for name, request in self.requests.items():
            after = _snapshot(request)
            if after != before[name]:
                field, old, new = next(
                    entry for entry in zip(_FIELDS, before[name], after, strict=True) if entry[1] != entry[2]
                )
                raise Violation(f"`{what}` changed `{field}` of {name} from {old!r} to {new!r}")
        return result


def watched(policy: Policy, watch: Watch) -> Policy:
    """The same policy, whose parts report to `watch`."""
    return replace(
        policy,
        order=_WatchedOrder(policy.order, watch),
        eviction=_WatchedEviction(policy.eviction, watch),
        capacity=_WatchedCapacity(policy.capacity, watch),
        charge=_WatchedCharge(policy.charge, watch),
    )


def _snapshot(request: Request) -> tuple[object, ...]:
    values = (getattr(request, name) for name in _FIELDS)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


class _WatchedOrder(Order):
    def __init__(self, inner: Order, watch: Watch):
        self._inner = inner
        self._watch = watch

    def waiting_key(self, request: Request) -> float:
        return self._watch.call("order.waiting_key", self._inner.waiting_key, request)

    def running_key(self, request: Request) -> float:
        return self._watch.call("order.running_key", self._inner.running_key, request)

    def make_queue(self) -> WaitingQueue:
        self._watch.queue = _WatchedQueue(self._inner.make_queue(), self._watch)
        return self._watch.queue

    def attach(self, num_cached_tokens: Callable[[Request], int]) -> None:
        self._inner.attach(num_cached_tokens)


class _WatchedQueue:
    def __init__(self, inner: WaitingQueue, watch: Watch):
        self._inner = inner
        self._watch = watch

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._inner

    def __iter__(self) -> Iterator[Request]:
        return iter(self._inner)

    def push(self, request: Request) -> None:
        self._watch.call("queue.push", self._inner.push, request)

    def peek(self, now: float) -> Request | None:
        return self._watch.call("queue.peek", self._inner.peek, now)

    def key(self) -> float:
        return self._watch.call("queue.key", self._inner.key)

    def remove(self, request_id: str) -> bool:
        return self._watch.call("queue.remove", self._inner.remove, request_id)

    def check(self) -> None:
        self._inner.check()


class _WatchedEviction:
    def __init__(self, inner: Eviction, watch: Watch):
        self._inner = inner
        self._watch = watch
        self.evicts = inner.evicts

    def eviction_key(self, request: Request) -> tuple[float, int]:
        return self._watch.call("eviction.eviction_key", self._inner.eviction_key, request)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        self._watch.note_newcomer(newcomer)
        return self._watch.call("eviction.may_evict", self._inner.may_evict, newcomer, running)

    def is_spared(self, running: Request, other: Request) -> bool:
        return self._watch.call("eviction.is_spared", self._inner.is_spared, running, other)


class _WatchedCapacity:
    def __init__(self, inner: Capacity, watch: Watch):
        self._inner = inner
        self._watch = watch

    def fits(self, spare: int, head: Request, others: Sequence[Request], page_size: int) -> bool:
        return self._watch.call("capacity.fits", self._inner.fits, spare, head, others, page_size)

    def headroom(self, head: Request, others: Sequence[Request], page_size: int) -> int:
        return self._watch.call("capacity.headroom", self._inner.headroom, head, others, page_size)


class _WatchedCharge(Charge):
    def __init__(self, inner: Charge | None, watch: Watch):
        self._inner = Charge() if inner is None else inner
        self._watch = watch

    def on_arrival(self, request: Request, now: float) -> None:
        self._watch.call("charge.on_arrival", self._inner.on_arrival, request, now)

    def on_start(self, request: Request, now: float) -> None:
        self._watch.started.append(request.request_id)
        self._watch.call("charge.on_start", self._inner.on_start, request, now)

    def on_computed(self, request: Request, num_tokens: int, drew: bool) -> None:
        self._watch.call("charge.on_computed", self._inner.on_computed, request, num_tokens, drew)

    def on_put_back(self, request: Request, now: float) -> None:
        self._watch.note_put_back(request)
        self._watch.call("charge.on_put_back", self._inner.on_put_back, request, now)

    def on_end(self, request: Request) -> None:
        self._watch.call("charge.on_end", self._inner.on_end, request)
