"""`sjf`: the request that is predicted to need the fewest tokens first.

Shortest job first with predicted output lengths (Zheng et al., Response Length Perception, NeurIPS 2023; Fu et al.,
Efficient LLM Scheduling by Learning to Rank, 2024; remaining work after a preemption as in Trail, Shahout et al.,
2024). The least mean latency of all orders that do not preempt, and starvation of long requests unless they age.
"""

from collections.abc import Callable

from scheduler.config import SchedulerConfig
from scheduler.policies.base import Charge, Order, Policy
from scheduler.policies.options import non_negative
from scheduler.request import FinishReason, Request

Predictor = Callable[[Request], float]
"""Output tokens that a request is thought to generate, in all."""


class LengthHistory(Charge):
    """Predicts what ended requests of this tenant with prompts of about this length have generated, on average.

    A prediction given with the request (`predicted_new_tokens`) wins; with neither there is only the client's bound.
    """

    def __init__(self, weight: float = 0.1):
        self._weight = weight
        self._means: dict[tuple[str | None, int], float] = {}

    def predict(self, request: Request) -> float:
        """Tokens; never more than the client's bound."""
        if request.predicted_new_tokens is not None:
            return min(request.predicted_new_tokens, float(request.max_new_tokens))
        return min(self._means.get(self._kind(request), float("inf")), float(request.max_new_tokens))

    def on_end(self, request: Request) -> None:
        """Take the length into the moving mean of its kind."""
        kind, length = self._kind(request), float(len(request.output_token_ids))
        if length and request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._means[kind] = self._means.get(kind, length) * (1 - self._weight) + length * self._weight
            if len(self._means) > 10_000:
                del self._means[next(iter(self._means))]

    @staticmethod
    def _kind(request: Request) -> tuple[str | None, int]:
        return (request.tenant, request.num_prompt_tokens.bit_length())


class ShortestFirst(Order):
    """Least remaining work first: prompt tokens at `prefill_weight` and predicted output tokens.

    Attributes:
        aging_tokens_per_second: a request that waits counts as so many tokens shorter each second; 0 starves long ones.
        prefill_weight: what a prompt token costs beside an output token; prompts are computed many tokens a step.
    """

    def __init__(self, predict: Predictor, aging_tokens_per_second: float, prefill_weight: float):
        self._predict = predict
        self._aging = aging_tokens_per_second
        self._prefill_weight = prefill_weight

    def waiting_key(self, request: Request) -> float:
        """Remaining tokens, less what waiting has earned."""
        remaining = max(self._predict(request) - len(request.output_token_ids), 1.0)
        return remaining + self._prefill_weight * request.num_prompt_tokens + self._aging * request.queued_at


def sjf(config: SchedulerConfig, aging_tokens_per_second: float = 0.0, prefill_weight: float = 0.05) -> Policy:
    """Options: `aging_tokens_per_second`, `prefill_weight` (see `ShortestFirst`)."""
    history = LengthHistory()
    order = ShortestFirst(
        history.predict,
        non_negative("aging_tokens_per_second", aging_tokens_per_second),
        non_negative("prefill_weight", prefill_weight),
    )
    return Policy("sjf", order, charge=history, paper="Zheng et al., Response Length Perception, NeurIPS 2023")
