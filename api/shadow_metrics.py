"""The metrics of the shadow policy; made by `Metrics.bind_shadow`, fed by `api/shadow.py` from its own thread."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from scheduler.request import priority_class

LABELS = ("model_name", "policy")

Comparison = Literal["earlier", "later", "same"]


class ShadowNumbers(NamedTuple):
    """What is read from the shadow when a scrape asks. All but `num_waiting` only rise."""

    num_waiting: int
    num_preemptions: int
    num_dropped_events: int


class ShadowMeter:
    """The series of one shadow. `labels`: the values of `LABELS`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        labels: tuple[str, str],
        ttft_buckets: Sequence[float],
        numbers: Callable[[], ShadowNumbers],
    ):
        self._labels = labels
        self._ttft = Histogram(
            prefix + "shadow_time_to_first_token_seconds",
            "Arrival to first token, had the shadow policy decided.",
            (*LABELS, "priority_class"),
            registry=registry,
            buckets=tuple(ttft_buckets),
        )
        self._requests = Counter(
            prefix + "shadow_requests",
            "Requests by when the shadow policy would have given their first token, compared with when it came.",
            (*LABELS, "first_token"),
            registry=registry,
        )
        for comparison in ("earlier", "later", "same"):
            self._requests.labels(*labels, comparison)
        registry.register(_ShadowCollector(prefix, labels, numbers))

    def on_predicted(self, priority: float, ttft: float) -> None:
        """The shadow has given a request its first token, `ttft` seconds after its arrival."""
        self._ttft.labels(*self._labels, priority_class(priority)).observe(max(0.0, ttft))

    def on_compared(self, first_token: Comparison) -> None:
        """Both first tokens of a request are known: where the shadow's is."""
        self._requests.labels(*self._labels, first_token).inc()


class _ShadowCollector(Collector):
    def __init__(self, prefix: str, labels: tuple[str, str], numbers: Callable[[], ShadowNumbers]):
        self._prefix = prefix
        self._labels = labels
        self._numbers = numbers

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """One family per number."""
        num_waiting, num_preemptions, num_dropped = self._numbers()
        waiting = GaugeMetricFamily(
            f"{self._prefix}shadow_num_requests_waiting", "Requests that wait in the shadow.", labels=LABELS
        )
        preemptions = CounterMetricFamily(
            f"{self._prefix}shadow_preemptions", "Requests that the shadow put back to waiting.", labels=LABELS
        )
        dropped = CounterMetricFamily(
            f"{self._prefix}shadow_dropped_events", "Events that the shadow has missed.", labels=LABELS
        )
        waiting.add_metric(self._labels, num_waiting)
        preemptions.add_metric(self._labels, num_preemptions)
        dropped.add_metric(self._labels, num_dropped)
        yield from (waiting, preemptions, dropped)
