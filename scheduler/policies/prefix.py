"""`prefix`: the longest cached prefix first, among the oldest few, with a bound on waiting.

The cache-aware order of SGLang (Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs,
NeurIPS 2024, §3, "longest shared prefix first"): close to the hit rate of the optimal depth-first order. It starves
requests without a prefix, so here the oldest goes first whatever the cache holds once it has waited `max_wait_secs`.
"""

from collections.abc import Callable

from scheduler.config import SchedulerConfig
from scheduler.policies.base import Order, Policy
from scheduler.policies.options import non_negative, whole
from scheduler.queues import WaitingQueue, WindowQueue
from scheduler.request import Request


class LongestCachedPrefix(Order):
    """The most cached tokens first. The running share tokens by arrival."""

    def __init__(self, window: int, max_wait_secs: float):
        self._window = window
        self._max_wait_secs = max_wait_secs
        self._num_cached_tokens: Callable[[Request], int] = lambda request: 0

    def attach(self, num_cached_tokens: Callable[[Request], int]) -> None:
        """Keep the way to ask the cache."""
        self._num_cached_tokens = num_cached_tokens

    def make_queue(self) -> WaitingQueue:
        """The window of the oldest."""
        return WindowQueue(
            lambda request, now: -float(self._num_cached_tokens(request)), self._window, self._max_wait_secs
        )


def prefix(config: SchedulerConfig, window: int = 64, max_wait_secs: float = 5.0) -> Policy:
    """Options: `window` (how many of the oldest are compared) and `max_wait_secs`."""
    order = LongestCachedPrefix(whole("window", window), non_negative("max_wait_secs", max_wait_secs))
    return Policy("prefix", order, paper="Zheng et al., SGLang, NeurIPS 2024")
