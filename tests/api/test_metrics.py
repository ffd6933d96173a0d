"""Metrics: names and labels, counting, gauges at rest without traffic (B67), and faults that hurt nobody (B68)."""

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.config_loading import resolve
from api.metrics import Metrics
from api.server_state import ServerState
from model.engine_types import EngineStats, StepRecord
from scheduler import FinishReason, Request
from scheduler.request import priority_class
from scheduler.simulation.records import StepShape
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Served, served

MODEL = "fake-model"

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
COUNTERS = (
    "requests_received",
    "request_success",
    "request_failure",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preemptions",
    "compilations",
)
BY_CLASS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
)
HISTOGRAMS = (*BY_CLASS, "iteration_tokens", "step_time_seconds")


def scrape(metrics: Metrics) -> dict[str, float]:
    """Series with labels other than `model_name`, whose value is checked, without the prefix."""
    values = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            values[sample.name.removeprefix("twinmesh_") + (f"{{{text}}}" if text else "")] = sample.value
    return values


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def metrics(engine: FakeEngine) -> Metrics:
    metrics = Metrics()
    metrics.bind(MODEL, engine.stats)
    return metrics


def wait_for(condition: object, timeout_secs: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_metric_of_the_contract(metrics: Metrics) -> None:
    metrics.on_refused(429)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render()[0].decode())}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            family = families["twinmesh_" + name]
            assert family.type == kind, name
            assert family.documentation
            assert family.samples, name
            for sample in family.samples:
                assert ("priority_class" in sample.labels) == (name in BY_CLASS)
    totals = metrics.render()[0].decode()
    assert "twinmesh_requests_received_total{" in totals
    assert "twinmesh_compilations_total{" in totals
    assert metrics.render("application/openmetrics-text; version=1.0.0")[0].endswith(b"# EOF\n")


def test_priority_classes() -> None:
    assert [priority_class(priority) for priority in (0.0, 0.499, 0.5, 0.501, 1.0)] == ["low"] * 2 + ["default"] + [
        "high"
    ] * 2


def test_a_request_from_arrival_to_end(metrics: Metrics) -> None:
    request = Request("a", [1, 2, 3], 4, arrival_time=100.0, priority=1.0)
    request.admitted_at = 100.5
    metrics.on_received(2, 3)
    meter = metrics.meter(request)
    meter.on_tokens(1, 102.0)
    meter.on_tokens(2, 104.0)
    meter.on_finished(FinishReason.STOP, 105.0)
    meter.on_finished(FinishReason.ABORT, 106.0)
    meter.on_tokens(1, 107.0)
    values = scrape(metrics)
    high = "{priority_class=high}"
    expected = {
        "requests_received_total": 2,
        "prompt_tokens_total": 3,
        "generation_tokens_total": 3,
        "request_success_total{finished_reason=stop}": 1,
        "request_success_total{finished_reason=abort}": 0,
        f"time_to_first_token_seconds_sum{high}": 2.0,
        f"request_queue_time_seconds_sum{high}": 0.5,
        f"inter_token_latency_seconds_count{high}": 2,
        f"inter_token_latency_seconds_sum{high}": 2.0,
        f"e2e_request_latency_seconds_sum{high}": 5.0,
        "e2e_request_latency_seconds_count{priority_class=low}": 0,
    }
    assert {name: values[name] for name in expected} == expected


def test_steps(metrics: Metrics) -> None:
    metrics.on_step(StepRecord(1, StepShape(2, 64, 62, 80, 2000), 64, 2, 0.25, 10.0))
    values = scrape(metrics)
    assert (values["iteration_tokens_sum"], values["step_time_seconds_sum"]) == (64, 0.25)


def test_nothing_raises_and_nothing_goes_down(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    metrics.on_received(-5, -7)
    metrics.on_received("many", None)  # type: ignore[arg-type]
    metrics.on_step(StepRecord(1, StepShape(1, 1, 1, 1, 1), 1, 1, -3.0, 0.0))
    metrics.on_step(None)  # type: ignore[arg-type]
    meter = metrics.meter(Request("a", [1], 4, arrival_time=1000.0))
    meter.on_tokens(1, 10.0)
    meter.on_tokens(-3, 11.0)
    meter.on_tokens(1, 5.0)
    meter.on_finished("no reason", 3.0)  # type: ignore[arg-type]
    values = scrape(metrics)
    assert min(values.values()) >= 0
    assert values["generation_tokens_total"] == 2
    assert "a metric could not be updated" in caplog.text


def test_an_engine_that_cannot_be_read_leaves_the_rest(metrics: Metrics) -> None:
    def broken() -> EngineStats:
        raise RuntimeError

    other = Metrics()
    other.bind(MODEL, broken)
    other.on_received(1, 1)
    values = scrape(other)
    assert values["requests_received_total"] == 1
    assert "num_requests_running" not in values


def test_before_there_is_a_model_nothing_is_counted() -> None:
    metrics = Metrics()
    metrics.on_received(1, 1)
    metrics.on_refused(503)
    metrics.meter(Request("a", [1], 1)).on_tokens(1, 1.0)
    assert metrics.render()[0] == b""


def test_each_server_has_its_own(engine: FakeEngine) -> None:
    for _ in range(2):
        metrics = Metrics()
        metrics.bind(MODEL, engine.stats)
        metrics.on_received(1, 1)
        assert scrape(metrics)["requests_received_total"] == 1


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def test_gauges_come_to_rest_without_traffic(server: Served) -> None:
    server.engine.step_secs = 0.02
    prompt = list(range(18))
    body = json.dumps({"max_tokens": 200, "stream": True, "prompt": prompt}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    head += b"Content-Type: application/json\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(30)]
    for client in clients:
        client.sendall(head + body)
    metrics = server.state.metrics
    # Both, since the first eight run before the last one has arrived.
    wait_for(lambda: (v := scrape(metrics))["num_requests_running"] == 8 and v["num_requests_waiting"] == 22)
    during = scrape(metrics)
    assert 0 < during["kv_cache_usage_ratio"] <= 1
    for client in clients:
        client.close()
    wait_for(lambda: scrape(metrics)["num_requests_running"] == scrape(metrics)["num_requests_waiting"] == 0)
    wait_for(lambda: scrape(metrics)["kv_cache_usage_ratio"] == 0)
    wait_for(lambda: server.state.num_open_requests == 0)
    values = scrape(metrics)
    assert values["requests_received_total"] == 30
    assert values["request_success_total{finished_reason=abort}"] == 30
    assert not [name for name in values if name.startswith("request_failure_total")]


def test_what_is_received_ends_and_what_is_refused_is_counted_by_code(server: Served) -> None:
    with server.client() as client:
        for _ in range(3):
            client.post("/v1/completions", json={"priority": 0.0})
        client.post("/v1/completions", content=b"{}")
        client.get("/v1/completions")
        for name in ("a", "b", "c"):
            client.get(f"/made-up/{name}")
        client.get("/ready")
        text = client.get("/metrics").text
        assert client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    values = scrape(server.state.metrics)
    assert values["requests_received_total"] == values["request_success_total{finished_reason=length}"] == 3
    failures = {name: value for name, value in values.items() if name.startswith("request_failure_total")}
    assert failures == {
        f"request_failure_total{{code={code}}}": count for code, count in ((415, 1), (405, 1), (404, 3))
    }
    assert values["time_to_first_token_seconds_count{priority_class=low}"] == 3
    assert values["prefix_cache_queries_total"] > 0
    assert "made-up" not in text


def test_a_dead_engine_is_at_rest(server: Served) -> None:
    with server.client() as client:
        server.engine.die()
        wait_for(lambda: client.get("/ready").status_code == 503)
        assert client.post("/v1/completions", json={}).status_code == 503
        assert client.get("/metrics").status_code == 200
    values = scrape(server.state.metrics)
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0
    assert values["request_failure_total{code=503}"] == 1


def test_the_served_name_is_the_label(engine: FakeEngine) -> None:
    state = ServerState(resolve({"served_model_name": MODEL}))
    from tests.api.serving import FACTS

    state.attach(engine, object(), FACTS)  # type: ignore[arg-type]
    assert state.model_names == (MODEL,)
    assert scrape(state.metrics)


def test_scraping_under_load_slows_nobody(server: Served) -> None:
    server.engine.step_secs = 0.005
    with server.client() as client, httpx.Client(trust_env=False, verify=False) as scraper:
        gaps, last = [], None
        with client.stream("POST", "/v1/completions", json={"max_tokens": 100, "stream": True}) as response:
            for index, _ in enumerate(response.iter_raw()):
                now = time.monotonic()
                gaps.append(now - (last or now))
                last = now
                if index % 4 == 0:
                    scraper.get(f"http://127.0.0.1:{server.port}/metrics")
                    last = time.monotonic()
    assert max(gaps) < 0.5
