"""From the engine's thread to the event loop: events are collected without a lock and handed over once per step.

One `EventBridge` per server: `flush` is the engine's `on_step_done` hook. Each call to the API has a `Mailbox` whose
`put` is the sink that the engine is given. A wake-up of the loop costs a system call, so there is one per step, not per
token; an event that comes from elsewhere (an abort) brings its own.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident

from scheduler import Event

# Called on the event loop with the events that have come (to be popped from the left) and `time.monotonic()`.
Receiver = Callable[[deque[Event], float], None]

logger = logging.getLogger(__name__)


class EventBridge:
    """Owns the list of mailboxes with something in them. `deque` operations are atomic, so threads need no lock."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._filled: deque[Mailbox] = deque()
        self._wake_up_is_due = False
        self._flushing_thread: int | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the loop that receives, before the first request. On that loop's thread."""
        self._loop = loop

    def open_mailbox(self, receive: Receiver) -> "Mailbox":
        """A new mailbox; `receive` runs on the loop, must not block, and hurts nobody else when it raises."""
        return Mailbox(self, receive)

    def flush(self) -> None:
        """Wake the loop if anything has come. On the engine's thread, after the events of a step."""
        self._flushing_thread = get_ident()
        self._wake_up()

    def flush_unless_stepping(self) -> None:
        """Wake the loop, unless this thread will call `flush` anyway. Any thread."""
        if get_ident() != self._flushing_thread:
            self._wake_up()

    def list_filled(self, mailbox: "Mailbox") -> None:
        """Note that `mailbox` has events. Any thread."""
        self._filled.append(mailbox)

    def _wake_up(self) -> None:
        if self._wake_up_is_due or not self._filled or self._loop is None:
            return
        self._wake_up_is_due = True
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            # The loop is closed: the server has gone, and nobody waits for these events.
            self._filled.clear()

    def _hand_over(self) -> None:
        self._wake_up_is_due = False
        now = time.monotonic()
        filled = self._filled
        while filled:
            filled.popleft().hand_over(now)


class Mailbox:
    """The events of one call's requests that the loop has not seen yet."""

    __slots__ = ("_bridge", "_events", "_is_listed", "_receive")

    def __init__(self, bridge: EventBridge, receive: Receiver):
        self._bridge = bridge
        self._receive = receive
        self._events: deque[Event] = deque()
        self._is_listed = False

    def put(self, event: Event) -> None:
        """The engine's sink. Any thread; a few hundred nanoseconds."""
        self._events.append(event)
        if not self._is_listed:
            self._is_listed = True
            self._bridge.list_filled(self)
        if event.finish_reason is not None:
            self._bridge.flush_unless_stepping()

    def hand_over(self, now: float) -> None:
        """Give the events to the receiver. On the loop."""
        # In this order: an event that comes from now on lists the mailbox again.
        self._is_listed = False
        try:
            self._receive(self._events, now)
        except Exception:
            logger.exception("an event could not be handled")
            self._events.clear()
