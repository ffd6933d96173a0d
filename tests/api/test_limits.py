"""Bodies, headers and raw HTTP: what is too large, too slow, of the wrong kind or no HTTP at all (B18, B62)."""

import json
import re
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from api import http_protocol
from api.server_state import Limits
from tests.api.serving import Served, read_all, served

LIMIT = 1 << 20
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(limits=Limits(max_body_bytes=LIMIT, body_timeout_secs=0.5)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def canary(server: Served, client: httpx.Client) -> Iterator[None]:
    """After whatever was done to the server, it answers as ever."""
    yield
    answer = client.post("/v1/completions", json={"max_tokens": 2})
    assert (answer.status_code, answer.json()["text"].count("data:")) == (200, 3)
    deadline = time.monotonic() + 2
    while server.state.num_open_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.state.num_open_requests == 0
    server.engine.check()


def post(headers: bytes, body: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body


def statuses(answer: bytes) -> list[int]:
    """The status of every response in a byte stream."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def error_of(answer: bytes) -> dict[str, object]:
    envelope = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert set(envelope["error"]) == {"message", "type", "param", "code"}
    return dict(envelope["error"])


def test_a_body_at_the_limit_and_one_byte_more(client: httpx.Client) -> None:
    def padded(size: int) -> bytes:
        return b'{"max_tokens": 1}'.ljust(size)

    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/completions", content=padded(LIMIT), headers=headers).status_code == 200
    for content in (padded(LIMIT + 1), iter([padded(LIMIT), b" "])):
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert answer.headers["connection"] == "close"


def test_a_declared_length_is_refused_before_the_body_comes(server: Served) -> None:
    started_at = time.monotonic()
    answer = server.exchange(post(JSON + b"Content-Length: 100000000000\r\n"))
    assert statuses(answer) == [413]
    assert time.monotonic() - started_at < 4


def test_a_body_that_never_ends(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(post(JSON + b"Content-Length: 1000\r\n", b"{"))
        started_at = time.monotonic()
        for _ in range(4):
            time.sleep(0.1)
            connection.sendall(b" ")
        answer = read_all(connection, 5)
    assert statuses(answer) == [408]
    assert error_of(answer)["type"] == "timeout_error"
    assert time.monotonic() - started_at < 4


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json, text/plain"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/json", "Content-Encoding": "identity, gzip"},
    ],
)
def test_other_kinds_of_body(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = client.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_ways_to_say_json(client: httpx.Client, kind: str) -> None:
    assert client.post("/v1/completions", content=b"{}", headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/completions", 405, "OPTIONS, POST"),
        ("POST", "/health", 405, "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/completions", 405, "OPTIONS, POST"),
        ("GET", "/nowhere", 404, None),
        ("POST", "/nowhere", 404, None),
        ("POST", "/v1/completions/", 404, None),
        ("GET", "//health", 404, None),
        ("GET", "/static/x", 404, None),
        ("GET", "/../../etc/passwd", 404, None),
    ],
)
def test_no_such_route_or_method(client: httpx.Client, method: str, path: str, status: int, allow: str | None) -> None:
    answer = client.request(method, path, content=b"no json")
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)
    assert answer.json()["error"]["message"]


def test_head_and_options(client: httpx.Client) -> None:
    assert client.head("/health").status_code == 200
    options = client.options("/v1/completions")
    assert (options.status_code, options.content) == (200, b"")


def test_a_bug_is_a_500_that_tells_nothing(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"crash": "sk-marker"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "marker" not in answer.text
    assert "Traceback" not in answer.text
    assert "/" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        post(JSON + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"{}"),
        post(JSON + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
        post(JSON + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", b"0\r\n\r\n"),
        post(JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}"),
        post(JSON + b"Content-Length: 2\r\nContent-Length: 2\r\n", b"{}"),
        post(JSON + b"Content-Length: +2\r\n", b"{}"),
        post(JSON + b"Content-Length: -2\r\n", b"{}"),
        post(JSON + b"Content-Length: 0x2\r\n", b"{}"),
        post(JSON + b"Content-Length: 2, 2\r\n", b"{}"),
        post(JSON + b"Content-Length: 99999999999999999999999\r\n", b"{}"),
        post(JSON + b"Transfer-Encoding: gzip, identity\r\n", b"{}"),
        post(JSON + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", b"0\r\n\r\n"),
        post(JSON + b"Content-Length : 2\r\n", b"{}"),
        b"GET /health HTTP/1.1\r\nHost: x\r\nA\0B: c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n folded: c\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_one_answer(server: Served, raw: bytes) -> None:
    answer = server.exchange(raw, wait_secs=2)
    assert statuses(answer) == [400]
    assert error_of(answer)["code"] == "malformed_http"


@pytest.mark.parametrize(
    "chunks", [b"2\n{}\r\n0\r\n\r\n", b"2\r\n{}XX0\r\n\r\n", b"zz\r\n{}\r\n0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n"]
)
def test_bad_chunks(server: Served, chunks: bytes) -> None:
    answer = server.exchange(post(JSON + b"Transfer-Encoding: chunked\r\n", chunks), wait_secs=2)
    assert statuses(answer) == [400]


def test_rubbish_after_a_request_does_not_break_into_its_answer(server: Served) -> None:
    body = b'{"max_tokens": 100, "stream": true}'
    server.engine.step_secs = 0.005
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(post(JSON + b"Content-Length: %d\r\n" % len(body), body))
            start = connection.recv(65536)
            connection.sendall(b"rubbish\r\n\r\n")
            rest = read_all(connection, 3)
    finally:
        server.engine.step_secs = 0.0
    assert statuses(start + rest) == [200]
    time.sleep(0.2)


def test_pipelined_requests_are_answered_in_turn(server: Served) -> None:
    one = post(JSON + b"Content-Length: 2\r\n", b"{}")
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert statuses(server.exchange(one + one + last)) == [200, 200, 200]


def test_huge_headers(server: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    for raw in (
        head + b"A: " + b"a" * (http_protocol.MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
        head + b"".join(b"A%d: a\r\n" % index for index in range(100_000)) + b"\r\n",
        b"GET /" + b"a" * (http_protocol.MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\n\r\n",
        head + b"A" * (http_protocol.MAX_HEADER_BYTES + 1),
    ):
        answer = server.exchange(raw, wait_secs=3)
        assert statuses(answer) in ([431], []), "at most one answer; the peer may be cut off while it still sends"
    small = head + b"".join(b"A%d: a\r\n" % index for index in range(100)) + b"Connection: close\r\n\r\n"
    assert statuses(server.exchange(small)) == [200]


@pytest.mark.parametrize(
    "start", [b"GET /health HTTP/1.1\r\nA: ", post(JSON + b"Transfer-Encoding: chunked\r\n", b"0\r\nA: ")]
)
def test_a_line_that_never_ends_takes_no_memory(server: Served, start: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(start)
        piece = b"a" * 65536
        try:
            while sent < 100 << 20:
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
    assert sent < 50 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_headers_that_never_end(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECS", 0.3)
    answer = server.exchange(b"GET /health HTTP/1.1\r\nHost: x\r\n", wait_secs=3)
    assert statuses(answer) == [408]
    started_at = time.monotonic()
    assert server.exchange(b"", wait_secs=3) == b""
    assert time.monotonic() - started_at < 2
    # The clock starts anew for each request of a connection, and not while an answer is awaited.
    one = post(JSON + b"Content-Length: 2\r\n", b"{}")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(one)
        time.sleep(0.6)
        connection.sendall(one + b"GET /health")
        answer = read_all(connection, 3)
    assert statuses(answer) == [200, 200, 408]


def test_an_upgrade_is_not_taken_up(server: Served) -> None:
    h2c = (
        JSON
        + b"Content-Length: 2\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    )
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert statuses(server.exchange(post(h2c, b"{}") + last, wait_secs=2)) == [200, 200]
    websocket = b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nSec-WebSocket-Key: x\r\n"
    websocket += b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert statuses(server.exchange(websocket + last, wait_secs=2)) == [405, 200]


def test_a_client_that_expects_to_be_told_to_go_on(server: Served) -> None:
    answer = server.exchange(post(JSON + b"Content-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n", b"{}"))
    assert statuses(answer) == [100, 200]
    refused = server.exchange(post(b"Content-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n", b"{}"))
    assert statuses(refused)[-1] == 415


def test_request_ids(client: httpx.Client) -> None:
    def echoed(*values: bytes) -> str:
        headers = httpx.Headers([(b"X-Request-Id", value) for value in values])
        return str(client.get("/health", headers=headers).headers["x-request-id"])

    assert echoed(b"my-id~!") == "my-id~!"
    assert echoed(b"x" * 128) == "x" * 128
    for values in ([b"x" * 129], [b"two words"], [b"caf\xc3\xa9"], [], [b"a", b"b"]):
        assert echoed(*values).startswith("req-")
    errors = client.post("/nowhere", headers={"X-Request-Id": "mine"})
    assert errors.headers["x-request-id"] == "mine"
