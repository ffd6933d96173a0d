"""Classes of priority and service level objectives: which requests were served well enough. Used by `summary.py`.

The definition is DistServe's (Zhong et al., OSDI 2024, §2.1 and §6): a request attains its objectives when its TTFT
and its TPOT are both within bounds, TPOT being the mean time for each token after the first, which is the mean of
the request's ITLs. (Sarathi-Serve, Agrawal et al., OSDI 2024, bounds the 99th percentile of all ITLs of a run instead;
`Summary.overall.itl.p99` is that number.) Goodput is the rate of requests that attain, as vLLM's benchmark counts it;
DistServe calls the highest load at which 90 % attain by the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.simulation.records import Outcome

CLASSES = ("low", "default", "high")
FINISHED = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Objective:
    """Bounds in seconds, met when equal. None: no bound."""

    ttft_secs: float | None = None
    itl_secs: float | None = None


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds for every request, and other ones for some classes.

    Attributes:
        ttft_secs, itl_secs: bounds in seconds of the TTFT and of a request's mean ITL; None: no bound.
        by_class: bounds that replace both of these for a class of `CLASSES`.
    """

    ttft_secs: float | None = None
    itl_secs: float | None = None
    by_class: Mapping[str, Objective] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.by_class) - set(CLASSES))
        if unknown:
            raise ValueError(f"unknown classes of priority: {', '.join(unknown)}; known are {', '.join(CLASSES)}")

    def of(self, name: str) -> Objective:
        """The bounds of a class."""
        return self.by_class.get(name) or Objective(self.ttft_secs, self.itl_secs)


def mean_itl(outcome: Outcome) -> float | None:
    """Seconds per token after the first (TPOT); None with fewer than two tokens."""
    times = outcome.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def attains(outcome: Outcome, objective: Objective) -> bool:
    """Whether a request came to its own end within its bounds.

    Refused, aborted, failed and unfinished requests do not attain. One token alone misses no bound of ITLs.
    """
    if outcome.finish_reason not in FINISHED:
        return False
    ttft, itl = outcome.ttft, mean_itl(outcome)
    if objective.ttft_secs is not None and (ttft is None or ttft > objective.ttft_secs):
        return False
    return objective.itl_secs is None or itl is None or itl <= objective.itl_secs
