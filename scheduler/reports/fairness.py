"""How evenly tenants, or the requests of one class, were served: Jain's index of two kinds of share.

Called by `summary.py`. Both shares are of tokens, input and output alike, and are normalised by what was asked for:

- served: tokens served by the end of the run / tokens demanded (`input_length + output_length` of every request). A
  prompt counts as served with the first token. It is 1 for everybody in a run that drains.
- timely: ∫ served(t) dt / ∫ demanded(t) dt, from the first arrival to the moment T when the last request left, where
  served(t) and demanded(t) are what was served and asked for until t. That is Σ tokens × (T - when they came out)
  divided by Σ tokens × (T - when they were asked for): 1 for service without delay, less the longer a tenant's tokens
  were waited for. It tells policies apart in runs that drain too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.reports.statistics import jain_index
from scheduler.request import priority_class
from scheduler.simulation.records import Outcome


@dataclass(frozen=True, slots=True)
class Fairness:
    """Jain's index of both shares.

    Attributes:
        over: who is compared: `tenants`, or `low requests`, `default requests` or `high requests` (the most frequent
            class) where all requests belong to one tenant or to nobody.
        count: how many of them have a share.
        served, timely: the index, between 1 / `count` and 1, or None where there is nothing to compare.
    """

    over: str = "tenants"
    count: int = 0
    served: float | None = None
    timely: float | None = None


@dataclass(slots=True)
class _Account:
    """What one party asked for and got: tokens, and tokens × seconds."""

    served: int = 0
    demanded: int = 0
    served_area: float = 0.0
    demanded_area: float = 0.0

    def add(self, outcome: Outcome, end: float) -> None:
        arrival = outcome.arrival
        demanded = arrival.input_length + arrival.output_length
        self.demanded += demanded
        self.demanded_area += demanded * (end - arrival.time)
        if outcome.first_token_at is not None:
            times = outcome.token_times
            self.served += arrival.input_length + len(times)
            self.served_area += arrival.input_length * (end - outcome.first_token_at) + len(times) * end - sum(times)


def fairness(outcomes: list[Outcome], end: float) -> Fairness:
    """Of a run whose last request left at `end`."""
    tenants = {outcome.arrival.tenant for outcome in outcomes}
    if len(tenants) > 1:
        accounts: dict[str | None, _Account] = {}
        for outcome in outcomes:
            accounts.setdefault(outcome.arrival.tenant, _Account()).add(outcome, end)
        return _compare("tenants", accounts.values())
    by_class: dict[str, list[Outcome]] = {"default": [], "high": [], "low": []}
    for outcome in outcomes:
        by_class[priority_class(outcome.arrival.priority)].append(outcome)
    name = max(by_class, key=lambda name: len(by_class[name]))
    return _compare(f"{name} requests", (_account(outcome, end) for outcome in by_class[name]))


def _account(outcome: Outcome, end: float) -> _Account:
    account = _Account()
    account.add(outcome, end)
    return account


def _compare(over: str, accounts: Iterable[_Account]) -> Fairness:
    served, timely = [], []
    for account in accounts:
        served.append(account.served / account.demanded)
        if account.demanded_area > 0:
            timely.append(account.served_area / account.demanded_area)
    return Fairness(over, len(served), jain_index(served), jain_index(timely))
