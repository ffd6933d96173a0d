"""`mlfq`: skip-join multi-level feedback queue: who has been served little goes first, without knowing lengths.

Wu et al., Fast Distributed Inference Serving for Large Language Models (FastServe), 2023. A request joins the level
whose quantum its prompt fills (a long prompt skips the first levels), goes down a level whenever it has used up a
quantum, and goes to the first level when it has waited too long. A newcomer of a higher level may take the place of a
running request that has gone down. FastServe swaps KV out; here a preempted request is computed again, so quanta should
be long beside a prompt.
"""

from scheduler.config import SchedulerConfig
from scheduler.policies.base import Charge, Order, Policy
from scheduler.policies.options import positive, whole
from scheduler.queues import TurnQueue, WaitingQueue
from scheduler.request import Request


class Levels(Charge):
    """Who stands on which level. Service is counted in tokens: output tokens as one, prompt tokens at `prefill_weight`.

    Level l has a quantum of quantum · 2^l; the last has none.
    """

    def __init__(self, quantum: int, num_levels: int, prefill_weight: float):
        self._quanta = [quantum * 2**level for level in range(num_levels - 1)]
        self._prefill_weight = prefill_weight
        self._level: dict[str, int] = {}
        self._used: dict[str, float] = {}

    def level(self, request: Request) -> int:
        """0 is the most urgent."""
        return self._level.get(request.request_id, 0)

    def on_arrival(self, request: Request, now: float) -> None:
        """Join the first level whose quantum holds the prompt."""
        cost = self._prefill_weight * request.num_prompt_tokens
        fitting = (level for level, quantum in enumerate(self._quanta) if cost <= quantum)
        self._level[request.request_id] = next(fitting, len(self._quanta))
        self._used[request.request_id] = 0.0

    def on_computed(self, request: Request, num_tokens: int, drew: bool) -> None:
        """Go down once the quantum is used up."""
        name = request.request_id
        self._used[name] += 1.0 if num_tokens == 1 and drew else self._prefill_weight * num_tokens
        level = self._level[name]
        if level < len(self._quanta) and self._used[name] >= self._quanta[level]:
            self._level[name] = level + 1
            self._used[name] = 0.0

    def on_end(self, request: Request) -> None:
        """Forget it."""
        del self._level[request.request_id], self._used[request.request_id]


class LevelOrder(Order):
    """Lower levels first, by arrival within one; who has waited `promote_after_secs` goes before all."""

    def __init__(self, levels: Levels, promote_after_secs: float):
        self._levels = levels
        self._promote_after_secs = promote_after_secs

    def running_key(self, request: Request) -> float:
        """The level at the start."""
        return float(self._levels.level(request))

    def make_queue(self) -> WaitingQueue:
        """A group for each level; nobody changes level while waiting."""
        return TurnQueue(self._levels.level, self._urgency)

    def _urgency(self, level: object, head: Request, now: float) -> float:
        starved = now - head.queued_at >= self._promote_after_secs
        return -1.0 if starved else float(self._levels.level(head))


class DemotedFirst:
    """A newcomer may take the place of a running request on a lower level, unless that was promoted when it started."""

    def __init__(self, levels: Levels, preempt_running: bool):
        self._levels = levels
        self.evicts = preempt_running

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """The lowest level first, then the latest."""
        return (float(self._levels.level(request)), request.sequence)

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        """Only for one who has never run: else two long requests would take turns and lose their work each time."""
        return (
            self.evicts
            and not newcomer.num_preemptions
            and running.admitted_key >= 0.0
            and self._levels.level(newcomer) < self._levels.level(running)
        )

    def is_spared(self, running: Request, other: Request) -> bool:
        """Promoted ones keep their pages from those who were not."""
        return running.admitted_key < 0.0 <= other.admitted_key


def mlfq(
    config: SchedulerConfig,
    quantum: int = 64,
    num_levels: int = 4,
    prefill_weight: float = 0.05,
    promote_after_secs: float = 10.0,
) -> Policy:
    """Options: see `Levels` and `LevelOrder`. `preempt_running: false` in the configuration turns eviction off."""
    levels = Levels(
        whole("quantum", quantum), whole("num_levels", num_levels), positive("prefill_weight", prefill_weight)
    )
    return Policy(
        "mlfq",
        LevelOrder(levels, positive("promote_after_secs", promote_after_secs)),
        DemotedFirst(levels, config.preempt_running),
        charge=levels,
        paper="Wu et al., FastServe, 2023",
    )
