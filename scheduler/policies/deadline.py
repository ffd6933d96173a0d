"""`deadline`: earliest deadline first, on objectives for the first token and between tokens.

EDF (Liu and Layland, JACM 1973) on the deadlines of QLM (Patke et al., SoCC 2024) and SLOs-Serve (Chen et al., 2025):
the first token is due a TTFT objective after the arrival, and each later one an ITL objective after that. A request
that was put back is therefore due when its next token is. Every deadline comes closer, so nothing starves.
"""

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError
from scheduler.policies.base import LatestFirst, Order, Policy
from scheduler.policies.options import non_negative, positive, table
from scheduler.request import Request, priority_class


class EarliestDeadline(Order):
    """The next token that is due first goes first.

    Attributes:
        ttft_secs, itl_secs: class of priority (`low`, `default`, `high`) → objective in seconds.
    """

    def __init__(self, ttft_secs: dict[str, float], itl_secs: dict[str, float]):
        self._ttft_secs = ttft_secs
        self._itl_secs = itl_secs

    def waiting_key(self, request: Request) -> float:
        """When the next token is due."""
        kind = priority_class(request.priority)
        return request.arrival_time + self._ttft_secs[kind] + len(request.output_token_ids) * self._itl_secs[kind]


class LatestDeadline(LatestFirst):
    """Nobody makes room for a newcomer; when pages run out, the one that is due last is put back."""

    def __init__(self, order: EarliestDeadline):
        self._order = order

    def eviction_key(self, request: Request) -> tuple[float, int]:
        """The latest deadline is the greatest."""
        return (self._order.waiting_key(request), request.sequence)


def deadline(config: SchedulerConfig, ttft_secs: object = None, itl_secs: object = None) -> Policy:
    """Options: `ttft_secs` and `itl_secs`, each a number for all or a table by class of priority."""
    order = EarliestDeadline(
        _objectives("ttft_secs", ttft_secs, {"high": 0.5, "default": 2.0, "low": 10.0}),
        _objectives("itl_secs", itl_secs, {"high": 0.1, "default": 0.1, "low": 0.2}),
    )
    return Policy("deadline", order, LatestDeadline(order), paper="Liu and Layland, JACM 1973")


def _objectives(name: str, given: object, default: dict[str, float]) -> dict[str, float]:
    if given is None:
        return default
    if isinstance(given, int | float) and not isinstance(given, bool):
        return dict.fromkeys(default, positive(name, given))
    chosen = table(name, given)
    unknown = sorted(set(chosen) - set(default))
    if unknown:
        raise ConfigError(f"{name} has no class {unknown[0]!r}; known: {', '.join(default)}")
    return default | {kind: non_negative(f"{name}.{kind}", value) for kind, value in chosen.items()}
