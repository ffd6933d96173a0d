"""Short bursts of work for threads that share the interpreter with the engine: `api/recording.py`, `api/shadow.py`."""

import time
from collections.abc import Callable

BURST_SECS = 0.001
REST_SECS = 0.0005


class Pace:
    """Called in between, it rests now and then, so that the engine gets the interpreter; not `in_a_hurry`."""

    def __init__(self, in_a_hurry: Callable[[], bool]):
        self._in_a_hurry = in_a_hurry
        self._rested_at = time.monotonic()

    def __call__(self) -> None:
        """Rest, if there was work for a whole burst."""
        if time.monotonic() - self._rested_at > BURST_SECS and not self._in_a_hurry():
            time.sleep(REST_SECS)
            self._rested_at = time.monotonic()
