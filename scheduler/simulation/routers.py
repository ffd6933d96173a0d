"""Which replica gets a request. Used by `Simulator`; the disaggregated front end's routers follow the same rules."""

from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.errors import ConfigError
from scheduler.simulation.records import Arrival
from scheduler.simulation.replica import Replica


class Router(Protocol):
    """Chooses for one pool. `choose` may mutate the router's own state; it never changes a replica."""

    def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """Index of the replica that gets this request. `replicas` is the same, never empty, sequence every time."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """The next in turn."""
        index = self._next % len(replicas)
        self._next += 1
        return index


class LeastRequests:
    """The fewest live requests; equal ones by index."""

    def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """The least loaded now."""
        return min(range(len(replicas)), key=lambda index: replicas[index].num_live)


class LeastTokens:
    """The fewest tokens to come; equal ones by index."""

    def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """The least loaded now."""
        return min(range(len(replicas)), key=lambda index: replicas[index].num_live_tokens)


class KvCacheAware:
    """The longest prefix that a replica was given before, less `load_weight` pages for each of its live requests."""

    def __init__(self, page_size: int, load_weight: float = 4.0):
        self._page_size = page_size
        self._load_weight = load_weight
        self._seen: list[set[tuple[int, ...]]] = []

    def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """The best score; equal ones by index. What a replica's cache has forgotten since is not known here."""
        while len(self._seen) < len(replicas):
            self._seen.append(set())
        ids = arrival.hash_ids
        prefixes = [ids[: length + 1] for length in range(len(ids))]
        best, best_score = 0, float("-inf")
        for index, replica in enumerate(replicas):
            matched = 0
            for prefix in prefixes:
                if prefix not in self._seen[index]:
                    break
                matched += 1
            pages = matched * arrival.block_size / self._page_size
            score = pages - self._load_weight * replica.num_live
            if score > best_score:
                best, best_score = index, score
        self._seen[best].update(prefixes)
        return best


class Conversation:
    """A session stays on its replica; a new one goes to the fewest live requests."""

    def __init__(self) -> None:
        self._home: dict[str, int] = {}
        self._otherwise = LeastRequests()

    def choose(self, arrival: Arrival, replicas: Sequence[Replica]) -> int:
        """The session's home, given at its first request."""
        if arrival.session is None:
            return self._otherwise.choose(arrival, replicas)
        if arrival.session not in self._home:
            self._home[arrival.session] = self._otherwise.choose(arrival, replicas)
        return self._home[arrival.session]


_ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": lambda page_size: RoundRobin(),
    "least_requests": lambda page_size: LeastRequests(),
    "least_tokens": lambda page_size: LeastTokens(),
    "kv_cache_aware": KvCacheAware,
    "conversation": lambda page_size: Conversation(),
}
ROUTER_NAMES = tuple(_ROUTERS)


def make_router(name: str, page_size: int) -> Router:
    """A router by name. Raises ConfigError for an unknown one."""
    if name not in _ROUTERS:
        raise ConfigError(f"unknown router {name!r}; known: {', '.join(ROUTER_NAMES)}")
    return _ROUTERS[name](page_size)
