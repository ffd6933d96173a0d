"""A progress bar on stderr: on a terminal one line that is drawn over, elsewhere nothing. Used by long commands."""

import sys
import time
from typing import TextIO

WIDTH = 32
LEAST_SECS_BETWEEN = 0.1


class ProgressBar:
    """How much of `total` is done. `update` and `close` write to the stream and may be called often."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None):
        self._label = label
        self._total = max(total, 1)
        self._stream = stream or sys.stderr
        self._is_shown = self._stream.isatty()
        self._started_at = self._drawn_at = time.monotonic()

    def update(self, done: int) -> None:
        """Draw, if the last time was long enough ago."""
        now = time.monotonic()
        if not self._is_shown or now - self._drawn_at < LEAST_SECS_BETWEEN:
            return
        self._drawn_at = now
        share = min(done / self._total, 1.0)
        filled = round(share * WIDTH)
        left = (now - self._started_at) * (1 - share) / share if share else 0.0
        bar = "#" * filled + "." * (WIDTH - filled)
        self._stream.write(f"\r{self._label} [{bar}] {100 * share:3.0f} %  {left:4.0f} s left ")
        self._stream.flush()

    def close(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._stream.write("\r" + " " * (len(self._label) + WIDTH + 28) + "\r")
            self._stream.flush()
