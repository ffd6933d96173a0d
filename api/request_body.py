"""Reading a request's body once, whole, within limits of size and time; and handing it on as ASGI messages.

Used by `api/edge.py` for every POST before a route sees it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from api.refusals import body_too_large, too_slow, unsupported_media_type

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Headers = Sequence[tuple[bytes, bytes]]

# How much of a refused body is still read, so that the client gets to see the answer rather than a reset connection.
LINGER_BYTES = 64 << 20
LINGER_SECS = 2.0


class ClientGone(Exception):
    """The client went away before its request was complete."""


def header_values(headers: Headers, name: bytes) -> list[bytes]:
    """Every value of a header (lower-case name)."""
    return [value for key, value in headers if key == name]


def check_media_type(headers: Headers) -> None:
    """JSON in UTF-8 and nothing else. Raises ApiError (415)."""
    types = header_values(headers, b"content-type")
    if len(types) != 1:
        raise unsupported_media_type("The body must come with 'Content-Type: application/json'.")
    media_type, *parameters = (part.strip().lower() for part in types[0].split(b";"))
    if media_type != b"application/json":
        raise unsupported_media_type("The body must be application/json.")
    for parameter in parameters:
        key, _, value = parameter.partition(b"=")
        if key == b"charset" and value.strip(b'"') not in (b"utf-8", b"utf8"):
            raise unsupported_media_type("The body must be in UTF-8.")
    for value in header_values(headers, b"content-encoding"):
        if value.strip().lower() not in (b"", b"identity"):
            raise unsupported_media_type("Compressed bodies are not supported.")


async def read_body(receive: Receive, headers: Headers, limit: int, timeout_secs: float) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises:
        ApiError: 413 for a longer one, at once if its length is declared; 408 if it takes longer than `timeout_secs`.
        ClientGone: the connection was closed first.
    """
    declared = header_values(headers, b"content-length")
    if declared and int(declared[0]) > limit:
        raise body_too_large(limit)
    try:
        async with asyncio.timeout(timeout_secs):
            return await _collect(receive, limit)
    except TimeoutError:
        raise too_slow("body") from None


async def _collect(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise body_too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


async def discard_rest(receive: Receive) -> None:
    """Read and forget what a refused client still sends, within bounds."""
    total = 0
    try:
        async with asyncio.timeout(LINGER_SECS):
            while total < LINGER_BYTES:
                message = await receive()
                total += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that gives `body` at first, and then only says when the client has gone."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return message

    return receive_again
