"""What the engine tells the outside: its state, a snapshot of numbers, a record of each step. Read by `api/`."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler.plan import SchedulerStats, StepPlan
from scheduler.simulation.records import StepShape


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

    `num_padded_tokens` and `num_padded_rows` are those of the program that ran it; `duration_secs` runs from when the
    device was free for the step to when its results were there. `started_after_idle`: the device had nothing to do
    before it.
    """

    step_id: int
    shape: StepShape
    num_padded_tokens: int
    num_padded_rows: int
    duration_secs: float
    finished_at: float
    started_after_idle: bool = False


def step_shape(plan: StepPlan) -> StepShape:
    """What the time of a step depends on. One pass over its rows, of which there are `max_num_seqs` at most."""
    num_tokens = num_prefill = num_kv = num_attended = 0
    # By position (`token_start`, `token_ids`, `samples`), as rows are tuples: this runs after every step.
    for row in plan.rows:
        count = len(row[5])
        kv_length = row[4] + count
        num_tokens += count
        num_kv += kv_length
        num_attended += count * kv_length
        if count > 1 or not row[8]:
            num_prefill += count
    return StepShape(len(plan.rows), num_tokens, num_prefill, num_kv, num_attended)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `compilations` counts programs compiled since the start; it is final once `warm_up_is_complete`."""

    scheduler: SchedulerStats
    state: EngineState
    error: str | None
    steps: int
    compilations: int
    warm_up_is_complete: bool
