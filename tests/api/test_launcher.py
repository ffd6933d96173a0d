"""The server as a process: start, drain, signals, the engine's death, exit codes (B44). The model is a fake."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]


class Process:
    """A server under test. `step` is the length of a step in seconds, or `never` for a model that never loads."""

    def __init__(self, step: str, *arguments: str, **environment: str):
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.api.serving", step, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self.stderr = ""
        self.url = ""
        self.ready = threading.Event()
        self._threads = [threading.Thread(target=self._read_stdout), threading.Thread(target=self._read_stderr)]
        for thread in self._threads:
            thread.start()

    def _read_stdout(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if match := re.search(r"ready at (\S+)", line):
                self.url = match[1]
                self.ready.set()

    def _read_stderr(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.stderr += line

    def signal(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def wait(self, timeout_secs: float) -> int:
        code = self.popen.wait(timeout_secs)
        for thread in self._threads:
            thread.join(5)
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()
        return code

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=5, verify=False)

    def post(self, **body: object) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=body, trust_env=False, timeout=30, verify=False)

    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextlib.contextmanager
def process(step: str, *arguments: str, wait_until_ready: bool = True, **environment: str) -> Iterator[Process]:
    running = Process(step, "--port", "0", *arguments, **environment)
    try:
        if wait_until_ready:
            assert running.ready.wait(30), running.stderr
        yield running
    finally:
        running.popen.kill()
        running.wait(10)
        assert "marker" not in running.stderr


class Stream(threading.Thread):
    """A streamed request in the background: its status, its text, whether it broke off."""

    def __init__(self, server: Process, max_tokens: int):
        super().__init__()
        self.server, self.max_tokens = server, max_tokens
        self.status, self.text, self.broken = 0, "", False
        self.first = threading.Event()
        self.start()
        assert self.first.wait(10)

    def run(self) -> None:
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "stream": True}
        url = self.server.url + "/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, trust_env=False, timeout=30, verify=False) as response:
                self.status = response.status_code
                for piece in response.iter_text():
                    self.text += piece
                    self.first.set()
        except httpx.HTTPError:
            self.broken = True


def unread_stream(server: Process) -> socket.socket:
    """A client that asks for a long stream and never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port()))
    body = json.dumps({"max_tokens": 250, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_drain_lets_running_requests_finish() -> None:
    with process("0.02") as server:
        stream = Stream(server, 75)
        before = len(stream.text)
        server.signal()
        time.sleep(0.2)
        for response in (server.get("/ready"), server.post()):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert "shutting down" in response.json()["error"]["message"]
        assert server.get("/health").status_code == 200
        stream.join(10)
        assert before < len(stream.text)
        assert stream.text.count("data: ") == 76
        assert stream.text.endswith("data: length\n\n")
        assert server.wait(5) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port()), timeout=1)


def test_a_drain_has_an_end() -> None:
    with process("0.1", "--set", "drain_timeout_secs=0.5") as server:
        stream = Stream(server, 250)
        silent = unread_stream(server)
        server.signal()
        started_at = time.monotonic()
        assert server.wait(10) == 0
        assert time.monotonic() - started_at < 6
        stream.join(5)
        assert "data: error" in stream.text
        assert not stream.broken
        silent.close()


def test_a_second_signal_ends_it_at_once() -> None:
    with process("0.1") as server:
        stream = Stream(server, 250)
        server.signal()
        time.sleep(0.3)
        server.signal()
        assert server.wait(2) == 1
        stream.join(5)
        assert stream.broken


def test_an_idle_server_leaves_at_once() -> None:
    with process("0") as server:
        assert server.post().status_code == 200
        server.popen.send_signal(signal.SIGINT)
        started_at = time.monotonic()
        assert server.wait(5) == 0
        assert time.monotonic() - started_at < 3


def test_http_answers_while_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with process("never", "--port", str(port), wait_until_ready=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            with contextlib.suppress(httpx.HTTPError):
                assert server.get("/health").status_code == 200
                break
            time.sleep(0.1)
        assert "being loaded" in server.get("/ready").json()["error"]["message"]
        assert server.get("/v1/models/x").status_code == server.post().status_code == 503
        assert server.get("/metrics").status_code == server.get("/server_info").status_code == 200
        server.signal()
        assert server.wait(5) == 0


def test_a_port_in_use_fails_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with process("never", "--port", port, wait_until_ready=False) as server:
            assert server.wait(20) == 1
            assert f"cannot listen on 127.0.0.1 port {port}: " in server.stderr


def test_a_bad_configuration_is_exit_code_2() -> None:
    with process("0", "--set", "max_num_seqs=1", wait_until_ready=False) as server:
        assert server.wait(20) == 2
        assert server.stderr.startswith("bad configuration: --set: unknown key")


def with_fault(fault: str, *more: str) -> contextlib.AbstractContextManager[Process]:
    return process("0.01", "--set", f"faults=[{fault}]", *more, TWINMESH_ALLOW_FAULTS="1")


def test_the_engine_dies() -> None:
    with with_fault("{point: engine.step, action: raise, after: 30}") as server:
        stream = Stream(server, 200)
        stream.join(5)
        assert stream.text.endswith("data: error\n\n")
        assert server.get("/ready").status_code == 503
        assert server.wait(5) == 1
        assert "InjectedFault" in server.stderr


def test_a_crash_in_the_engine() -> None:
    with with_fault("{point: engine.step, action: exit, after: 5}") as server:
        stream = Stream(server, 200)
        assert server.wait(5) == 1
        stream.join(5)
        assert stream.broken


@pytest.mark.slow
def test_a_stall_shows_and_does_not_hold_up_the_end() -> None:
    settings = ("--set", "engine_stall_secs=0.3", "--set", "drain_timeout_secs=0.5")
    with with_fault("{point: engine.step, action: hang, after: 5}", *settings) as server:
        stream = Stream(server, 200)
        time.sleep(0.8)
        assert "stalled" in server.get("/ready").json()["error"]["message"]
        server.signal()
        assert server.wait(10) == 0
        stream.join(5)


def test_keys_by_environment_are_nowhere_to_be_seen() -> None:
    with process("0.01", "--set", "log_level=debug", TWINMESH_API_KEYS="sk-marker-1,sk-marker-2") as server:
        assert server.post().status_code == 401
        headers = {"Authorization": "Bearer sk-marker-1"}
        for path in ("/server_info", "/metrics", "/version?key=sk-marker-1", "/nowhere?sk-marker-1"):
            assert "marker" not in httpx.get(server.url + path, headers=headers, trust_env=False, verify=False).text
        arguments = Path(f"/proc/{server.popen.pid}/cmdline")
        if arguments.exists():
            assert b"marker" not in arguments.read_bytes()
        server.signal()
        assert server.wait(5) == 0
