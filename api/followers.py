"""What happens to one engine request, told to several: its meter, the recording, the shadow policy.

`ServerState.follow` makes one for each request; `api/generation/call.py` tells it, on the event loop.
"""

from collections.abc import Sequence
from typing import Protocol

from scheduler import FinishReason


class RequestFollower(Protocol):
    """Told what happens to one request, in order, on the event loop. None of these blocks or raises.

    Times are of `time.monotonic`. A request that the engine refuses is never told of.
    """

    def on_queued(self, now: float) -> None:
        """The engine has taken the request."""

    def on_tokens(self, count: int, now: float) -> None:
        """`count` more output tokens have come."""

    def on_finished(self, reason: FinishReason, now: float) -> None:
        """The request has ended. Later calls do nothing."""


class Followers:
    """Several followers of one request as one."""

    __slots__ = ("_followers",)

    def __init__(self, followers: Sequence[RequestFollower]):
        self._followers = tuple(followers)

    def on_queued(self, now: float) -> None:
        """The engine has taken the request."""
        for follower in self._followers:
            follower.on_queued(now)

    def on_tokens(self, count: int, now: float) -> None:
        """`count` more output tokens have come."""
        for follower in self._followers:
            follower.on_tokens(count, now)

    def on_finished(self, reason: FinishReason, now: float) -> None:
        """The request has ended."""
        for follower in self._followers:
            follower.on_finished(reason, now)
