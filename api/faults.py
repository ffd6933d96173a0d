"""Faults on purpose: an object that the engine calls before each step and that may raise, hang, exit or wait.

Built by `api/launch.py` from the key `faults`, which is refused without `TWINMESH_ALLOW_FAULTS=1`. docs/faults.md lists
points and actions.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ENGINE_STEP = "engine.step"
SUPPORTED_POINTS = frozenset({ENGINE_STEP})
EXIT_CODE = 1
MAX_DELAY_SECS = 3600.0


class FaultError(ValueError):
    """An action that does not exist or does not fit its point."""


class InjectedFault(RuntimeError):
    """What the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class Action:
    """A parsed action: `raise`, `hang`, `exit` or `delay`, the last with seconds."""

    kind: str
    delay_secs: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a point: it lets `after` passes go by, then acts on `count` of them (None: on all)."""

    action: Action
    after: int = 0
    count: int | None = 1


def parse_action(text: str) -> Action:
    """`raise`, `hang`, `exit` or `delay:SECONDS`. Raises FaultError."""
    kind, colon, seconds = text.partition(":")
    if kind == "delay" and colon:
        try:
            delay = float(seconds)
        except ValueError:
            delay = -1.0
        if not 0.0 <= delay <= MAX_DELAY_SECS:
            raise FaultError(f"a delay takes seconds from 0 to {MAX_DELAY_SECS:.0f}, as in delay:0.5")
        return Action("delay", delay)
    if kind in ("raise", "hang", "exit") and not colon:
        return Action(kind)
    if kind in ("drop", "corrupt", "replay"):
        raise FaultError(f"{kind!r} does not apply to {ENGINE_STEP}")
    raise FaultError("the actions are raise, hang, exit and delay:SECONDS")


class FaultPoint:
    """One place in the code where faults may act. Call it there; the calls of one point must not overlap.

    A call may raise InjectedFault, end the process, or block (`hang`: until `release`).
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        sleep: Callable[[float], None] = time.sleep,
        end_process: Callable[[int], object] = os._exit,
    ):
        self._faults = tuple(faults)
        self._sleep = sleep
        self._end_process = end_process
        self._passes = 0
        self._released = threading.Event()

    def __call__(self) -> None:
        """Pass the point once."""
        if not self._faults:
            return
        index = self._passes
        self._passes += 1
        for fault in self._faults:
            if index >= fault.after and (fault.count is None or index < fault.after + fault.count):
                self._act(fault.action)

    def release(self) -> None:
        """Let go of whatever hangs here."""
        self._released.set()

    def _act(self, action: Action) -> None:
        if action.kind == "raise":
            raise InjectedFault("a fault was injected here")
        if action.kind == "exit":
            self._end_process(EXIT_CODE)
        elif action.kind == "hang":
            self._released.wait()
        else:
            self._sleep(action.delay_secs)
