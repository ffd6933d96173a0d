"""`priority`: highest effective priority first, with ageing and eviction of strictly lower requests.

The rule:

- effective priority = given priority + aging_per_second · seconds waited. Time spent running does not count; time
  waited before a preemption does. Highest goes first, equal ones by arrival (order of being added).
- Requests of one given priority never overtake each other: they go by arrival. A preempted request arrived before those
  that never started, and so goes before them. Whoever stands in front of a request that has aged more is served as if
  it had aged as much.
- A higher newcomer wins over a preempted request, unless that has aged past it.
- Eviction compares given priorities: strictly lower only. A request that started because it had aged to the newcomer's
  given priority is spared, else it would be put back for ever.

All the waiting age at one rate, so the order of two of them is fixed: effective(t) = priority + aging ·
(t − queued_at), of which priority − aging · queued_at alone tells requests apart. Keys are static and heaps serve.
Ageing against starvation is a classic of operating systems (Silberschatz et al., Operating System Concepts, ch. 5).
"""

from scheduler.config import SchedulerConfig
from scheduler.line_queue import LineQueue
from scheduler.policies.base import Order, Policy
from scheduler.queues import WaitingQueue
from scheduler.request import Request


class PriorityOrder(Order):
    """Greatest effective priority first; one line per given priority."""

    def __init__(self, aging_per_second: float):
        self._aging = aging_per_second

    def waiting_key(self, request: Request) -> float:
        """Minus the effective priority, less what all have in common."""
        return self._aging * request.queued_at - request.priority

    def make_queue(self) -> WaitingQueue:
        """Lines, in which equal priorities go by arrival."""
        return LineQueue(lambda request: request.priority, self.waiting_key)


class PriorityEviction:
    """Strictly lower given priorities make room, unless they had aged to the newcomer's when they started."""

    def __init__(self, aging_per_second: float, preempt_running: bool):
        self._aging = aging_per_second
        self.evicts = preempt_running

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """Lowest given priority first, then the latest."""
        return (-request.priority, request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Strictly lower given priority, and not started on account of age."""
        return (
            running.priority < newcomer.priority
            and self.evicts
            and self._effective_at_start(running) < newcomer.priority
        )

    def is_spared(self, running: Request, other: Request) -> bool:
        """Started because it had aged to the other's given priority."""
        return running.priority < other.priority <= self._effective_at_start(running)

    def _effective_at_start(self, running: Request) -> float:
        return self._aging * running.admitted_at - running.admitted_key


def priority(config: SchedulerConfig) -> Policy:
    """Ageing and eviction as `aging_per_second` and `preempt_running` say."""
    return Policy(
        "priority",
        PriorityOrder(config.aging_per_second),
        PriorityEviction(config.aging_per_second, config.preempt_running),
        paper="Silberschatz et al., Operating System Concepts, ch. 5",
    )
