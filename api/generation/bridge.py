"""From the engine's thread to the event loop: events are queued cheaply, and one wake-up a step hands them over.

`EventBridge.push` is the engine's sink; `flush` is called once per step (and after an abort), so that 160 streams cost
one crossing of threads, not 160.
"""

import asyncio
from collections import deque
from typing import Protocol

from scheduler.plan import Event


class EventConsumer(Protocol):
    """Takes events on the event loop. Must not block or raise."""

    def on_event(self, event: Event) -> None:
        """One event of one of the consumer's requests."""

    def on_batch_end(self) -> None:
        """All events of this wake-up that concern the consumer have been given."""


class EventBridge:
    """One per server. `push` and `flush` may be called from any thread, the rest from the event loop alone."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[Event] = deque()
        self._scheduled = False
        self._consumers: dict[str, EventConsumer] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop that events go to."""
        self._loop = loop

    def subscribe(self, request_id: str, consumer: EventConsumer) -> None:
        """Send a request's events to a consumer, until `unsubscribe`."""
        self._consumers[request_id] = consumer

    def unsubscribe(self, request_id: str) -> None:
        """Drop whatever still comes for a request."""
        self._consumers.pop(request_id, None)

    def push(self, event: Event) -> None:
        """Queue an event."""
        self._pending.append(event)

    def flush(self) -> None:
        """Wake the event loop if there is something for it."""
        if self._pending and not self._scheduled and self._loop is not None:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop has been closed: nobody is left to tell
                self._scheduled = False

    def _drain(self) -> None:
        self._scheduled = False
        touched: dict[int, EventConsumer] = {}
        while self._pending:
            event = self._pending.popleft()
            consumer = self._consumers.get(event.request_id)
            if consumer is not None:
                consumer.on_event(event)
                touched[id(consumer)] = consumer
        for consumer in touched.values():
            consumer.on_batch_end()
