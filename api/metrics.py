"""The Prometheus metrics of one server, under the names of vLLM's so that dashboards carry over.

`api/generation/` and `api/edge.py` report what happens to requests; `api/routes/operations.py` renders a scrape. Gauges
and the scheduler's counters are read from the engine when a scrape asks for them, so that they come to rest without
traffic. No fault in here ever reaches a request: it is logged and forgotten.

Before `bind` there is no model and so no `model_name`; what is reported until then is not counted.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Concatenate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from api.followers import RequestFollower
from api.shadow_metrics import ShadowMeter, ShadowNumbers
from model.engine_types import EngineStats, StepRecord
from scheduler import FinishReason, Request
from scheduler.request import priority_class

PREFIX = "twinmesh_"
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.15,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PRIORITY_CLASSES = ("low", "default", "high")

logger = logging.getLogger(__name__)


def _never_raises[Owner, **P](
    method: Callable[Concatenate[Owner, P], None],
) -> Callable[Concatenate[Owner, P], None]:
    """A fault in a metric is logged and goes no further."""

    @functools.wraps(method)
    def guarded(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            logger.exception("a metric could not be updated")

    return guarded


@dataclass(frozen=True, slots=True)
class _ClassHistograms:
    """The four histograms of one priority class, their labels filled in."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    queue: Histogram


class _Instruments:
    """Everything that is counted here rather than read from the engine, for one model."""

    def __init__(self, registry: CollectorRegistry, model_name: str):
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ("model_name", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, ("model_name", *labels), registry=registry, buckets=tuple(buckets))

        received = counter("requests_received", "Engine requests admitted; each prompt and choice is one.")
        success = counter("request_success", "Engine requests ended, by reason.", "finished_reason")
        self.failure = counter("request_failure", "Calls refused before admission, by HTTP status.", "code")
        prompt = counter("prompt_tokens", "Prompt tokens, once per prompt whatever the number of choices.")
        generation = counter("generation_tokens", "Output tokens, those of aborted requests too.")
        ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS, "priority_class")
        itl = histogram("inter_token_latency_seconds", "Between output tokens.", ITL_BUCKETS, "priority_class")
        e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS, "priority_class")
        queue = histogram("request_queue_time_seconds", "Arrival to first run.", LATENCY_BUCKETS, "priority_class")
        tokens = histogram("iteration_tokens", "Tokens of one step.", TOKEN_BUCKETS)
        step = histogram("step_time_seconds", "Duration of one step.", STEP_BUCKETS)
        self.model_name = model_name
        self.received, self.prompt_tokens = received.labels(model_name), prompt.labels(model_name)
        self.generation_tokens = generation.labels(model_name)
        self.success = {reason: success.labels(model_name, reason.value) for reason in FinishReason}
        self.by_class = {
            name: _ClassHistograms(*(metric.labels(model_name, name) for metric in (ttft, itl, e2e, queue)))
            for name in PRIORITY_CLASSES
        }
        self.iteration_tokens, self.step_time = tokens.labels(model_name), step.labels(model_name)


class _EngineCollector(Collector):
    """Reads the engine when a scrape asks."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]):
        self._labels = (model_name,)
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """One family per number; nothing when the engine cannot be read."""
        try:
            stats = self._stats()
        except Exception:
            logger.exception("the engine's numbers could not be read")
            return
        now = stats.scheduler
        usage = now.pages_in_use / now.num_pages if now.num_pages else 0.0
        yield self._gauge("num_requests_running", "Requests that hold a slot.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for one.", now.num_waiting)
        yield self._gauge("kv_cache_usage_ratio", "Share of the KV pages that live requests hold.", usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", now.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", now.prefix_cache_hits)
        yield self._counter("preemptions", "Requests put back to waiting.", now.num_preemptions)
        yield self._counter("compilations", "Programs compiled, warm-up included.", stats.compilations)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric(self._labels, value)
        return family


class Metrics:
    """All metrics of one server, in a registry of its own. Any thread may call any method."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._instruments: _Instruments | None = None

    def bind(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        """Create the series of a model. Once, before the first request."""
        if self._instruments is not None:
            raise RuntimeError("the metrics are bound already")
        self._registry.register(_EngineCollector(model_name, stats))
        self._instruments = _Instruments(self._registry, model_name)

    def bind_shadow(self, policy: str, numbers: Callable[[], ShadowNumbers]) -> ShadowMeter:
        """Create the series of the shadow policy; `numbers` is asked at each scrape. Once, after `bind`."""
        if self._instruments is None:
            raise RuntimeError("the metrics are not bound yet")
        return ShadowMeter(self._registry, PREFIX, (self._instruments.model_name, policy), TTFT_BUCKETS, numbers)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """A scrape and its content type. Blocks for some milliseconds."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    @_never_raises
    def on_received(self, num_requests: int, num_prompt_tokens: int) -> None:
        """A call was admitted: that many engine requests, whose prompts (each counted once) have so many tokens."""
        if self._instruments is not None:
            self._instruments.received.inc(max(0, num_requests))
            self._instruments.prompt_tokens.inc(max(0, num_prompt_tokens))

    @_never_raises
    def on_refused(self, code: int) -> None:
        """A call was refused with this HTTP status before anything of it was admitted."""
        if self._instruments is not None:
            self._instruments.failure.labels(self._instruments.model_name, str(code)).inc()

    @_never_raises
    def on_step(self, record: StepRecord) -> None:
        """The engine's step listener."""
        if self._instruments is not None:
            self._instruments.iteration_tokens.observe(record.shape.num_tokens)
            self._instruments.step_time.observe(max(0.0, record.duration_secs))

    def meter(self, request: Request) -> RequestFollower:
        """Follows one admitted request. Calls of one meter must not overlap."""
        return _Meter(request, self._instruments) if self._instruments is not None else NoMeter()


class NoMeter:
    """Counts nothing."""

    def on_queued(self, now: float) -> None:
        """Nothing."""

    def on_tokens(self, count: int, now: float) -> None:
        """Nothing."""

    def on_finished(self, reason: FinishReason, now: float) -> None:
        """Nothing."""


class _Meter:
    """Times of one request. `time_to_first_token_seconds` is taken at the first token, gaps from then on."""

    __slots__ = ("_counters", "_finished", "_histograms", "_last_token_at", "_request")

    def __init__(self, request: Request, instruments: _Instruments):
        self._request = request
        self._counters = instruments
        self._histograms = instruments.by_class[priority_class(request.priority)]
        self._last_token_at: float | None = None
        self._finished = False

    def on_queued(self, now: float) -> None:
        """Counted by call, in `Metrics.on_received`."""

    @_never_raises
    def on_tokens(self, count: int, now: float) -> None:
        if count <= 0 or self._finished:
            return
        self._counters.generation_tokens.inc(count)
        gaps = count
        if self._last_token_at is None:
            self._histograms.ttft.observe(max(0.0, now - self._request.arrival_time))
            self._observe_queue_time()
            self._last_token_at = now
            gaps -= 1
        gap = max(0.0, now - self._last_token_at) / gaps if gaps else 0.0
        for _ in range(gaps):
            self._histograms.itl.observe(gap)
        self._last_token_at = now

    @_never_raises
    def on_finished(self, reason: FinishReason, now: float) -> None:
        if self._finished:
            return
        self._finished = True
        self._counters.success[reason].inc()
        self._histograms.e2e.observe(max(0.0, now - self._request.arrival_time))
        if self._last_token_at is None and self._request.admitted_at:
            self._observe_queue_time()

    def _observe_queue_time(self) -> None:
        self._histograms.queue.observe(max(0.0, self._request.admitted_at - self._request.arrival_time))
