"""The scheduler as a library: plain Python, standard library only, time and seeds passed in.

`model/engine.py` drives it on a device; a simulation drives the same object with no device at all.
"""

from scheduler.config import SchedulerConfig
from scheduler.errors import (
    ConfigError,
    DuplicateRequestError,
    InvariantError,
    NeverFitsError,
    QueueFullError,
    SchedulerError,
)
from scheduler.pages import PagePool
from scheduler.plan import Event, PlannedRow, RowResult, SchedulerStats, StepPlan, StepResult
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.scheduler import Scheduler

__all__ = [
    "ConfigError",
    "DuplicateRequestError",
    "Event",
    "FinishReason",
    "InvariantError",
    "NeverFitsError",
    "PagePool",
    "PlannedRow",
    "QueueFullError",
    "Request",
    "RequestStatus",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerStats",
    "StepPlan",
    "StepResult",
]
