"""Shows how long work tells of itself: bars when stderr is a terminal, log lines when it is not.

Used by `api/supervisor.py`. Both follow `model.progress.Progress`.
"""

import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from api.logs import get_logger

LOG_INTERVAL_SECS = 5.0

logger = get_logger("api.launch")


class LoggedProgress:
    """A line when a task starts and ends, and every few seconds between. Any one thread."""

    def __init__(self) -> None:
        self._name = ""
        self._total: float | None = None
        self._done = 0.0
        self._started_at = self._logged_at = 0.0

    def start(self, name: str, total: float | None) -> None:
        """A task begins."""
        self._name, self._total, self._done = name, total, 0.0
        self._started_at = self._logged_at = time.monotonic()
        logger.info("started", task=name)

    def advance(self, amount: float) -> None:
        """Some of it is done."""
        self._done += amount
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_SECS:
            self._logged_at = now
            share = {"percent": round(100 * self._done / self._total)} if self._total else {}
            logger.info("working", task=self._name, **share)

    def finish(self) -> None:
        """The task is done."""
        logger.info("finished", task=self._name, seconds=round(time.monotonic() - self._started_at, 1))

    def close(self) -> None:
        """Nothing is left on the screen."""


class BarProgress:
    """A bar per task on a terminal. Any one thread; `close` any thread."""

    def __init__(self, stream: TextIO):
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(file=stream),
        )
        self._task: TaskID | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._bars.start()

    def start(self, name: str, total: float | None) -> None:
        """A task begins; the bar swings when its length is not known."""
        self._task = self._bars.add_task(name, total=total)

    def advance(self, amount: float) -> None:
        """Some of it is done."""
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def finish(self) -> None:
        """The task is done."""
        if self._task is not None:
            total = self._bars.tasks[self._bars.task_ids.index(self._task)].total or 1
            self._bars.update(self._task, total=total, completed=total)
            self._task = None

    def close(self) -> None:
        """Leave the terminal to others. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._bars.stop()


def make_progress() -> LoggedProgress | BarProgress:
    """Bars if stderr is a terminal."""
    return BarProgress(sys.stderr) if sys.stderr.isatty() else LoggedProgress()
