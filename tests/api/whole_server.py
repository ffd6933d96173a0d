"""A real server as a user starts it: `python -m api.serve` in a process of its own, on a free loopback port."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


class WholeServer:
    """Started when entered, stopped when left; `log` is what it printed."""

    def __init__(
        self, folder: Path, *settings: str, model: str | None = None, environment: dict[str, str] | None = None
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = folder / "server.log"
        self._command = [sys.executable, "-m", "api.serve", "--port", str(self.port)]
        self._command += ["--model", model] if model else []
        for setting in settings:
            self._command += ["--set", setting]
        # One virtual device is what a user has; the tests' own eight would only slow this down.
        self._environment = {**os.environ, "XLA_FLAGS": "", **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> "WholeServer":
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.wait_for(lambda info: info["engine"]["warm_up_is_complete"])
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def wait_for(self, condition, timeout: float = 500) -> None:
        """Poll `/server_info` until the condition holds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.log[-3000:]
            try:
                info = httpx.get(f"{self.url}/server_info", timeout=5).json()
                if "engine" in info and condition(info):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not in time: {self.log[-3000:]}")

    def metrics(self) -> dict[str, float]:
        """Series → value, labels but `model_name` kept as printed."""
        values = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    def total(self, stem: str) -> float:
        """Sum of a metric over its labels."""
        return sum(v for k, v in self.metrics().items() if k.split("{")[0] == f"twinmesh_{stem}")

    def check_at_rest(self) -> None:
        """Nothing runs or waits and no page is held, within 5 seconds and without traffic."""
        deadline = time.monotonic() + 5
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
        while any(self.total(name) for name in names) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [self.total(name) for name in names] == [0, 0, 0]
