"""What is logged, and what never is (B63)."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from api import logs
from api.config_loading import resolve
from tests.api.serving import served


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = False
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_line_per_request_with_what_is_known(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    with served() as server, server.client() as client:
        client.post("/v1/completions?q=marker", json={"max_tokens": 2}, headers={"X-Request-Id": "mine"})
        client.get("/v1/models/marker")
        client.get("/marker")
        client.get("/health")
        client.get("/metrics")
    requests = [line for line in lines(stream) if line["event"] == "request"]
    assert [(line["route"], line["status"], line["method"]) for line in requests] == [
        ("/v1/completions", 200, "POST"),
        ("/v1/models/<name>", 200, "GET"),
        ("", 404, "GET"),
    ]
    assert requests[0]["request_id"] == "mine"
    assert isinstance(requests[0]["duration_ms"], float)
    assert {"level", "timestamp", "logger"} <= set(requests[0])
    assert "marker" not in stream.getvalue()


@pytest.mark.parametrize("style", ["json", "console"])
def test_no_secret_in_any_line(stream: io.StringIO, style: str) -> None:
    logs.configure("debug", style, stream)
    config = resolve({"api_keys": ["sk-marker-right"]})
    with served(config=config) as server, server.client() as client:
        right = {b"Authorization": b"Bearer sk-marker-right", b"X-Marker": b"marker"}
        for headers in ({}, {b"x-api-key": b"sk-marker-wrong"}, {b"Authorization": b"Bearer marker \x80"}, right):
            for path in ("/v1/completions?key=sk-marker-right", "/marker", "/health?marker", "/v1/models/marker"):
                for content in (b'{"prompt": "marker"', b'{"max_tokens": 1, "user": "marker"}', b'{"crash": "marker"}'):
                    client.post(path, content=content, headers={**headers, b"Content-Type": b"application/json"})
                client.get(path, headers=headers)
        server.exchange(b"GET /marker HTTP/1.1\r\nmarker\r\n\r\n", 2)
    text = stream.getvalue()
    assert "marker" not in text.lower()
    # The crash is there all the same.
    assert "RuntimeError" in text
    assert "a route failed" in text
    assert "serving.py" in text


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize("name", ["api.test", "model.test"])
def test_no_line_can_be_forged(stream: io.StringIO, style: str, name: str) -> None:
    logs.configure("info", style, stream)
    forged = 'x\n{"event": "forged"}\r\n\x1b[2J\u2028forged'
    logs.get_logger(name).info("event " + forged, field=forged)
    logging.getLogger(name).warning("foreign %s", forged)
    text = stream.getvalue()
    assert len(text.splitlines()) == len(text.rstrip("\n").split("\n")) == 2
    assert "\x1b[2J" not in text
    assert "\r" not in text


def test_exceptions_of_the_api_lose_their_words_and_those_of_the_model_keep_them(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    # Not as they stand, for a traceback quotes the source.
    inner, outer = "-".join(("inner", "text")), "-".join(("outer", "text"))
    for name in ("api.app", "quart.app", "model.engine"):
        try:
            try:
                raise KeyError(inner)
            except KeyError as error:
                raise ValueError(outer) from error
        except ValueError:
            logging.getLogger(name).exception("it failed")
    first, second, third = lines(stream)
    for line in (first, second):
        assert "-text" not in str(line["exception"])
        assert "KeyError" in str(line["exception"])
        assert "ValueError" in str(line["exception"])
    assert inner in str(third["exception"])
    assert outer in str(third["exception"])


def test_levels(stream: io.StringIO) -> None:
    logs.configure("warning", "json", stream)
    logs.get_logger("api.x").info("not this")
    logging.getLogger("model.x").info("nor this")
    logs.get_logger("api.x").warning("this")
    assert [line["event"] for line in lines(stream)] == ["this"]


def test_auto_is_json_unless_on_a_terminal(stream: io.StringIO) -> None:
    logs.configure("info", "auto", stream)
    logs.get_logger("api.x").info("hello", number=3)
    assert lines(stream)[0]["number"] == 3


def test_rate_limited_warnings(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    now = 100.0
    warnings = logs.RateLimitedWarnings(interval_secs=60, clock=lambda: now)
    assert [warnings.warn("priority", "no effect", priority=1.0) for _ in range(5)] == [True] + [False] * 4
    assert warnings.warn("other", "another")
    now = 161.0
    assert warnings.warn("priority", "no effect", priority=1.0)
    logged = lines(stream)
    assert [line["event"] for line in logged] == ["no effect", "another", "no effect"]
    assert (logged[0].get("repeated"), logged[2]["repeated"]) == (None, 4)
    for index in range(10_000):
        warnings.warn(f"key {index}", "many")
    assert len(lines(stream)) <= 3 + logs.MAX_WARNING_KEYS
