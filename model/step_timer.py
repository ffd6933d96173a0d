"""How long steps take, and when to plan the next one. Owned by `model/engine.py`.

The next step should be planned shortly before the device is free: early enough that the device never waits, late enough
that a request which arrives meanwhile is in it. To plan too late costs the device some milliseconds; to plan too early
costs every request that arrives in between a whole step more. So the estimate of a step's length follows the median,
not the least. A step's end is watched for, not guessed: an estimate fed with our own sleep would never come down.
"""

import time
from collections.abc import Callable

from model.runner import StepHandle
from model.staging import StepLayout

# How long before the expected end of a step the next one is planned. Covers planning, staging and dispatch.
LEAD_SECS = 0.005
POLL_SECS = 0.001
# An estimate moves by at most this factor a step towards what the step took, so that it settles at the median.
PACE = 1.03


class StepTimer:
    """Times the steps of one device. One thread; `await_planning_time` blocks, for a step at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._expected: dict[StepLayout, float] = {}
        self._free_at = 0.0
        self._seen_done_at: float | None = None

    def await_planning_time(self, running: StepHandle) -> None:
        """Return when the step under way is done, or nearly so by the estimate for its layout, if there is one."""
        self._seen_done_at = None
        expected = self._expected.get(running.layout, float("inf"))
        deadline = max(running.started_at, self._free_at) + expected - LEAD_SECS
        while (left := deadline - self._clock()) > 0:
            if running.is_done():
                self._seen_done_at = self._clock()
                return
            time.sleep(min(left, POLL_SECS))

    def was_idle_before(self, handle: StepHandle) -> bool:
        """Whether the device had nothing to do when the step was handed to it. Ask before `finished`."""
        return handle.started_at >= self._free_at

    def finished(self, handle: StepHandle) -> tuple[float, float]:
        """A step's results are there: (seconds that it took, when it ended)."""
        ended_at = self._clock() if self._seen_done_at is None else self._seen_done_at
        self._seen_done_at = None
        duration = ended_at - max(handle.started_at, self._free_at)
        self._free_at = ended_at
        self._expected[handle.layout] = _towards(duration, self._expected.get(handle.layout))
        return duration, ended_at


def _towards(duration: float, known: float | None) -> float:
    """The next estimate. One that is more than twice too long was of a step that something held up: it is dropped."""
    if known is None or duration < known / 2:
        return duration
    return max(duration, known / PACE) if duration < known else min(duration, known * PACE)
