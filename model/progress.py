"""How long work tells of itself: a small protocol that the launcher implements with a bar or with log lines."""

from typing import Protocol


class Progress(Protocol):
    """One task at a time. Called from the thread that does the work; must not block or raise."""

    def start(self, name: str, total: float | None) -> None:
        """A task begins; `total` is None when its length is not known."""

    def advance(self, amount: float) -> None:
        """Some of the task's total is done."""

    def finish(self) -> None:
        """The task is done."""


class NoProgress:
    """Says nothing."""

    def start(self, name: str, total: float | None) -> None:
        """Nothing."""

    def advance(self, amount: float) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""
