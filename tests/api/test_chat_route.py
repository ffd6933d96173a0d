"""`POST /v1/chat/completions` on the fake engine: logprobs, prefill, priorities, failures in every state."""

import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from api.server_state import Limits
from scheduler import SchedulerConfig
from tests.api.serving import Served
from tests.api.tiny import chat, completion, metric, parse_events, saying, serving, wait_until

EMOJI = "😀ď한".encode()


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(saying(EMOJI, EMOJI[:-1], EMOJI[1:] + b"!")) as running:
        yield running


def post(server: Served, body: dict[str, Any]) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_partial_characters(server: Served, stream: bool) -> None:
    """B06."""
    body = chat(n=3, logprobs=True, top_logprobs=5, stream=stream)
    entries: list[list[dict[str, Any]]] = [[], [], []]
    texts = ["", "", ""]
    if stream:
        with server.client() as client:
            events = parse_events(client.post("/v1/chat/completions", json=body).text)
        for event in events[:-1]:
            assert isinstance(event, dict)
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
            entries[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    else:
        for choice in post(server, body)["choices"]:
            texts[choice["index"]] = choice["message"]["content"]
            entries[choice["index"]] = choice["logprobs"]["content"]
    assert texts == ["😀ď한", "😀ď", EMOJI[1:].decode(errors="replace") + "!"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[0]) == EMOJI
    for text, content in zip(texts, entries, strict=True):
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == text
        for entry in content:
            assert isinstance(entry["token"], str)
            assert len(entry["top_logprobs"]) == 5
            assert all(isinstance(top["token"], str) and top["bytes"] for top in entry["top_logprobs"])


@pytest.mark.parametrize(("fields", "count"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)])
def test_top_logprobs(server: Served, fields: dict[str, Any], count: int) -> None:
    """B11."""
    content = post(server, chat(logprobs=True, max_tokens=2, **fields))["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [count, count]


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 1}])
def test_top_logprobs_refused(server: Served, fields: dict[str, Any]) -> None:
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=chat(**fields)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [[], None, "x", [{}], [{"role": "user"}], [{"role": "SYSTEM", "content": "x"}]])
def test_bad_messages(server: Served, messages: Any, stream: bool) -> None:
    """B12, B13."""
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={**chat(stream=stream), "messages": messages})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("echo", [False, True])
def test_prefill(server: Served, echo: bool) -> None:
    """B17."""
    server.engine.script = saying("ok")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure,\n\n"}]
    body = {**chat(echo=echo, continue_final_message=True), "messages": messages}
    answers = [post(server, body)["choices"][0] for _ in range(2)]
    server.engine.script = saying(EMOJI, EMOJI[:-1], EMOJI[1:] + b"!")
    assert answers[0] == answers[1]
    assert answers[0]["message"]["content"] == ("Sure,\n\n" if echo else "") + "ok"
    assert bytes(server.engine.submitted[-1].prompt_token_ids[-7:]) == b"Sure,\n\n"


def test_priority_without_effect_is_logged_now_and_then(server: Served) -> None:
    with capture_logs() as logs:
        for priority in (0.5, 1.0, 0.0):
            post(server, chat(priority=priority, max_tokens=1))
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "fcfs" in warnings[0]["event"]


def test_priority_reaches_the_engine() -> None:
    settings = {"scheduler_config": {"waiting_queue_policy": "priority"}}
    with serving(settings=settings) as server, capture_logs() as logs:
        for fields, priority in (({"priority": 1}, 1.0), ({"service_tier": "flex"}, 0.0), ({}, 0.5)):
            post(server, chat(**fields))
            assert server.engine.submitted[-1].priority == priority
        assert [entry for entry in logs if entry["log_level"] == "warning"] == []


# -- failures ---------------------------------------------------------------------------------------------------------


def test_dead_engine_before_the_first_byte() -> None:
    with serving() as server, server.client() as client:
        server.engine.pause()
        answers: list[Any] = []
        bodies = (chat(), chat(stream=True))
        threads = [
            threading.Thread(target=lambda body=body: answers.append(client.post("/v1/chat/completions", json=body)))
            for body in bodies
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server.engine.submitted) == 2)
        server.engine.die()
        for thread in threads:
            thread.join(5)
        assert [answer.status_code for answer in answers] == [500, 500]
        assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
        refused = client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 503
        assert metric(server, "request_success_total", finished_reason="error") == 2


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_dead_engine_after_some_tokens(route: str) -> None:
    """B23: one error event, no finish reason, no [DONE], and the connection's answer ends."""
    with serving(saying("abcdefgh", end=False), step_secs=0.02) as server, server.client() as client:
        body = {**(chat() if route.startswith("chat") else completion()), "stream": True, "n": 2}
        received = ""
        with client.stream("POST", f"/v1/{route}", json=body) as response:
            for piece in response.iter_text():
                received += piece
                if received.count("data: ") > 6:
                    server.engine.die()
        events = parse_events(received)
        assert isinstance(events[-1], dict)
        assert set(events[-1]) == {"error"}
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        for event in events[:-1]:
            assert isinstance(event, dict)
            assert event["choices"][0]["finish_reason"] is None
        assert metric(server, "request_success_total", finished_reason="error") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_time_limit_before_the_first_token(stream: bool) -> None:
    with serving(limits=Limits(request_timeout_secs=0.2)) as server, server.client() as client:
        server.engine.pause()
        response = client.post("/v1/chat/completions", json=chat(stream=stream))
        assert (response.status_code, response.json()["error"]["type"]) == (408, "timeout_error")
        server.engine.resume()
        wait_until(lambda: server.engine.stats().scheduler.num_running == 0)
        assert metric(server, "request_success_total", finished_reason="abort") == 1
        assert metric(server, "requests_received_total") == 1
        assert metric(server, "request_failure_total", code="408") == 0


def test_time_limit_after_some_tokens() -> None:
    limits = Limits(request_timeout_secs=0.3)
    with serving(saying("abc", end=False), step_secs=0.02, limits=limits) as server, server.client() as client:
        events = parse_events(client.post("/v1/chat/completions", json=chat(stream=True)).text)
        assert len(events) > 3
        assert isinstance(events[-1], dict)
        assert events[-1]["error"]["type"] == "timeout_error"
        assert client.post("/v1/chat/completions", json=chat(max_tokens=1)).status_code == 200


def test_request_that_could_never_fit_is_400() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_pages=3, page_size=16)
    with serving(scheduler=config) as server, server.client() as client:
        response = client.post("/v1/completions", json=completion("x" * 40, max_tokens=30))
        assert response.status_code == 400
        assert "40" in response.json()["error"]["message"]
        assert client.post("/v1/completions", json=completion("x" * 40)).status_code == 200
