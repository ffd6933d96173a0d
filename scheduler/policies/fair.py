"""`fair`: the tenant that has been served least goes first (Virtual Token Counter).

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024. Each tenant has a counter of weighted tokens: prompt
tokens when a request starts, output tokens as they are drawn. A tenant that comes back after having had nothing waiting
is lifted to the least counter among those who wait, so that idling earns no credit. Between two tenants that always
have requests waiting, the counters never differ by more than max(w_p · longest prompt, w_q · tokens of a full batch,
prompts and outputs), and the service that they get in any interval by no more than twice that (their Lemma 4.3 and
Theorem 4.4).
"""

from scheduler.config import SchedulerConfig
from scheduler.policies.base import Charge, Order, Policy
from scheduler.policies.options import positive, table
from scheduler.queues import TurnQueue, WaitingQueue
from scheduler.request import Request


class TokenCounters(Charge):
    """Service received by each tenant, in weighted tokens divided by the tenant's weight."""

    def __init__(self, prompt_weight: float, output_weight: float, weights: dict[str, float]):
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._weights = weights
        self._counters: dict[str | None, float] = {}
        self._num_waiting: dict[str | None, int] = {}
        self._num_live: dict[str | None, int] = {}
        self._last_left = 0.0

    def service(self, tenant: str | None) -> float:
        """The tenant's counter; 0 for one never seen."""
        return self._counters.get(tenant, 0.0)

    def on_arrival(self, request: Request, now: float) -> None:
        """Lift a tenant that had nothing waiting."""
        tenant = request.tenant
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1
        self._join(tenant)

    def on_start(self, request: Request, now: float) -> None:
        """Charge the prompt tokens that have to be computed; once, for a preemption is not the tenant's fault."""
        if not request.num_preemptions:
            tokens = request.num_prompt_tokens - request.num_computed_tokens
            self._charge(request.tenant, self._prompt_weight * tokens)
        self._leave(request.tenant)

    def on_computed(self, request: Request, num_tokens: int, drew: bool) -> None:
        """Charge an output token."""
        if drew:
            self._charge(request.tenant, self._output_weight)

    def on_put_back(self, request: Request, now: float) -> None:
        """It waits again; its tenant was never away."""
        self._num_waiting[request.tenant] = self._num_waiting.get(request.tenant, 0) + 1

    def on_end(self, request: Request) -> None:
        """Forget tenants that have nothing left, once the others have passed them: they would be lifted anyway."""
        tenant = request.tenant
        if request.slot is None:  # it was waiting
            self._leave(tenant)
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
            if len(self._counters) > 1000 + 2 * len(self._num_live):
                self._counters = {known: self._counters[known] for known in self._num_live if known in self._counters}

    def _join(self, tenant: str | None) -> None:
        if not self._num_waiting.get(tenant):
            others = [self.service(other) for other in self._num_waiting]
            floor = min(others) if others else self._last_left
            self._counters[tenant] = max(self.service(tenant), floor)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def _leave(self, tenant: str | None) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_left = self.service(tenant)

    def _charge(self, tenant: str | None, amount: float) -> None:
        weight = 1.0 if tenant is None else self._weights.get(tenant, 1.0)
        self._counters[tenant] = self.service(tenant) + amount / weight


class LeastServedTenant(Order):
    """Tenants take turns, the least served first; within a tenant by arrival."""

    def __init__(self, counters: TokenCounters):
        self._counters = counters

    def make_queue(self) -> WaitingQueue:
        """A group for each tenant."""
        return TurnQueue(lambda request: request.tenant, lambda tenant, head, now: self._service(head))

    def _service(self, head: Request) -> float:
        return self._counters.service(head.tenant)


def fair(
    config: SchedulerConfig, prompt_weight: float = 1.0, output_weight: float = 2.0, weights: object = None
) -> Policy:
    """Options: `prompt_weight` and `output_weight` (the paper's w_p and w_q), `weights` (tenant → share)."""
    counters = TokenCounters(
        positive("prompt_weight", prompt_weight),
        positive("output_weight", output_weight),
        {tenant: positive(f"weights.{tenant}", share) for tenant, share in table("weights", weights or {}).items()},
    )
    return Policy("fair", LeastServedTenant(counters), charge=counters, paper="Sheng et al., VTC, OSDI 2024")
