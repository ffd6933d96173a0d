"""A client that goes away, in every state of its request: the engine's work ends and its pages are free."""

import contextlib
import json
import socket
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduler import SchedulerConfig
from tests.api.serving import Served
from tests.api.tiny import chat, completion, is_idle, metric, saying, serving, wait_until

ONE_SLOT = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256, num_pages=64, page_size=16)
STEP_SECS = 0.005


def send(server: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and keep the connection."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> None:
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["queued", "before the first token", "after some tokens"])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_disconnect(state: str, stream: bool, route: str) -> None:
    body = {**(chat() if route.startswith("chat") else completion()), "stream": stream, "n": 2}
    script = saying("abc", end=False)
    with (
        serving(script, scheduler=ONE_SLOT, step_secs=STEP_SECS) as server,
        capture_logs() as logs,
        server.client() as client,
    ):
        if state == "queued":
            other = send(server, "/v1/completions", completion(max_tokens=200, stream=True))
            read_until(other, b"data: ")
        if state == "before the first token":
            server.engine.pause()
        connection = send(server, f"/v1/{route}", body)
        wait_until(lambda: len(server.engine.submitted) == (3 if state == "queued" else 2))
        if state == "after some tokens":
            if stream:
                read_until(connection, b"data: ")
            wait_until(lambda: len(server.engine.submitted[0].output_token_ids) > 3)
        gone_at = time.monotonic()
        connection.close()
        wait_until(lambda: all(request.is_finished for request in server.engine.submitted[-2:]), 1.0)
        assert time.monotonic() - gone_at < 1.0
        server.engine.resume()
        if state == "queued":
            other.close()
        wait_until(lambda: is_idle(server))
        count = len(server.engine.submitted)
        wait_until(lambda: metric(server, "request_success_total", finished_reason="abort") == count)
        assert metric(server, "requests_received_total") == count
        wait_until(lambda: sum(entry.get("status") == 499 for entry in logs) == count - 1)
        assert client.post("/v1/completions", json=completion(max_tokens=3)).json()["choices"][0]["text"] == "abc"
        wait_until(lambda: server.state.num_open_requests == 0)
        server.engine.check()


def test_everybody_leaves_at_once() -> None:
    """B67: gauges at rest with no more traffic, and the next answer is right."""
    with serving(saying("abc", end=False), step_secs=0.002) as server, server.client() as client:
        connections = [send(server, "/v1/completions", completion(n=2, stream=i % 2 == 0)) for i in range(40)]
        wait_until(lambda: len(server.engine.submitted) == 80)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.close()
        wait_until(lambda: is_idle(server), 5.0)
        wait_until(lambda: server.state.num_open_requests == 0)
        assert client.post("/v1/completions", json=completion(max_tokens=3)).json()["choices"][0]["text"] == "abc"
        ended = [metric(server, "request_success_total", finished_reason=reason) for reason in ("abort", "length")]
        assert sum(ended) == metric(server, "requests_received_total") == 81


def test_client_that_leaves_after_its_answer_costs_nothing() -> None:
    with serving() as server:
        connection = send(server, "/v1/completions", completion(stream=True))
        read_until(connection, b"[DONE]")
        connection.close()
        wait_until(lambda: is_idle(server))
        wait_until(lambda: metric(server, "request_success_total", finished_reason="stop") == 1)
        assert metric(server, "request_success_total", finished_reason="abort") == 0
