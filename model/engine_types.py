"""What the engine tells the outside: its state, a snapshot of numbers, a record of each step. Read by `api/`."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler.plan import SchedulerStats


class EngineError(Exception):
    """Root of the engine's own errors."""


class EngineDeadError(EngineError):
    """The engine has failed or been stopped, and takes no requests."""


class EngineState(StrEnum):
    """Where the engine stands. Only READY takes requests; DEAD is final."""

    STARTING = "starting"
    WARMING_UP = "warming_up"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step. Durations in seconds, `finished_at` on the clock of `time.monotonic`.

    `num_padded_tokens` is the bucket that the step ran in; `duration_secs` runs from when the device was free for the
    step to when its results were there.
    """

    step_id: int
    num_rows: int
    num_tokens: int
    num_padded_tokens: int
    num_prefill_tokens: int
    duration_secs: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `compilations` counts programs compiled since the start; it is final once `warm_up_is_complete`."""

    scheduler: SchedulerStats
    state: EngineState
    error: str | None
    steps: int
    compilations: int
    warm_up_is_complete: bool
