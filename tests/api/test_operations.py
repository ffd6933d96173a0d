"""/health, /ready, /version, /server_info, and when the server is ready."""

import time
from collections.abc import Iterator

import httpx
import pytest

from api.config_loading import resolve
from api.server_state import ServerState
from model.engine_types import EngineState
from tests.api.fake_engine import FakeEngine
from tests.api.serving import FACTS, Served, served


@pytest.fixture
def server() -> Iterator[Served]:
    config = resolve({"api_keys": ["sk-marker"], "engine_stall_secs": 0.2})
    with served(config=config) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        client.headers["x-api-key"] = "sk-marker"
        yield client


def test_health_and_ready_need_no_key(client: httpx.Client) -> None:
    del client.headers["x-api-key"]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}


def test_ready_while_draining(server: Served, client: httpx.Client) -> None:
    server.state.begin_drain()
    ready = client.get("/ready")
    assert (ready.status_code, ready.json()["error"]["type"]) == (503, "service_unavailable_error")
    assert int(ready.headers["retry-after"]) > 0
    assert ready.headers["connection"] == "close"
    refused = client.post("/v1/completions", json={})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    # Looking goes on.
    assert client.get("/v1/models/x").status_code == 200
    assert client.get("/health").status_code == 200


def test_ready_with_a_stalled_engine_that_recovers(server: Served, client: httpx.Client) -> None:
    server.engine.pause()
    with client.stream("POST", "/v1/completions", json={"stream": True}) as response:
        time.sleep(0.4)
        with server.client() as other:
            assert "stalled" in other.get("/ready").json()["error"]["message"]
        # A stalled engine still queues.
        assert response.status_code == 200
        server.engine.resume()
        assert response.read().endswith(b"data: length\n\n")
    assert client.get("/ready").status_code == 200


def test_ready_with_a_dead_engine(server: Served, client: httpx.Client) -> None:
    server.engine.die()
    deadline = time.monotonic() + 2
    while client.get("/ready").status_code == 200:
        assert time.monotonic() < deadline
    assert "engine has stopped" in client.get("/ready").json()["error"]["message"]


def test_the_order_of_states() -> None:
    state = ServerState(resolve({}))
    assert state.not_ready_reason() == state.refusal_reason() == "the model is being loaded"
    with pytest.raises(LookupError):
        _ = state.engine
    with pytest.raises(LookupError):
        _ = state.tokenizer
    engine = FakeEngine()
    state.attach(engine, object(), FACTS)  # type: ignore[arg-type]
    engine.state = EngineState.WARMING_UP
    assert state.not_ready_reason() == state.refusal_reason() == "the server is warming up"
    engine.start()
    assert state.is_ready()
    assert state.refusal_reason() is None
    state.begin_drain()
    assert state.not_ready_reason() == "the server is shutting down"
    engine.stop()


def test_version(client: httpx.Client) -> None:
    assert list(client.get("/version").json()) == ["version"]


def test_server_info(client: httpx.Client) -> None:
    client.post("/v1/completions", json={})
    answer = client.get("/server_info")
    assert "marker" not in answer.text
    info = answer.json()
    assert (info["model"], info["device"], info["ready"]) == ("fake-model", "1 × FAKE", True)
    assert info["kernels"] == {"attention": "fake"}
    assert info["config"]["api_keys"] == ["<redacted>"]
    assert info["config"]["scheduler_config"]["max_num_seqs"] == 32
    assert info["engine"]["state"] == "ready"
    assert info["engine"]["steps"] > 0
    assert info["versions"]["jax"]
    assert info["uptime_seconds"] > 0


def test_openapi(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert "/v1/completions" in document["paths"]


def test_without_a_model() -> None:
    with served(attach=False) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        assert client.post("/v1/completions", json={}).status_code == client.get("/v1/models/x").status_code == 503
        assert client.get("/nowhere").status_code == 404
        assert (client.get("/metrics").status_code, client.get("/metrics").content) == (200, b"")
        info = client.get("/server_info").json()
        assert (info["model"], info["ready"]) == (None, False)
