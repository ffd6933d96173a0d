"""A small HTTP/1.1 client on a raw asyncio protocol, so that measuring costs little of the cores that are measured.

Used by the load generators and by nothing else. One connection carries one exchange at a time and is kept for the next.
Body bytes go to a sink as they arrive, with the time of the read that brought them. Parsing is left to httptools (the
parser of Node.js, RFC 9112).
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_SECS = 10.0


class BodySink(Protocol):
    """Takes the body of one answer. Must not block; an exception from it ends the exchange."""

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes, read at `now` on the clock of `time.perf_counter`."""


class ExchangeError(Exception):
    """The exchange did not end as HTTP says: refused, cut short, or not HTTP."""


class DroppedConnectionError(ExchangeError):
    """The server closed a kept connection before it answered: the request may be sent again on a new one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens. `base_path` comes before every path; it has no slash at its end."""

    host: str
    port: int
    is_tls: bool
    base_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """From a URL, with or without a scheme and a final `/v1`. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL: {url!r}")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, path)

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Response:
    """How an exchange went. Times are of `time.perf_counter`: request written, and last byte read."""

    status: int
    started: float
    ended: float


class _Connection(asyncio.Protocol):
    """One connection. Owned by the client that opened it; used by one task at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._ended: asyncio.Future[float] | None = None
        self._sink: BodySink | None = None
        self._now = 0.0
        self._has_answer = False
        self._is_delimited = False
        self._num_exchanges = 0
        self.is_reusable = False

    async def exchange(self, request: bytes, sink: BodySink) -> Response:
        """Write a request and wait for the end of its answer. Raises ExchangeError."""
        if self._transport is None:
            raise ExchangeError("the connection is not open")
        self._ended = asyncio.get_running_loop().create_future()
        self._sink, self._has_answer, self._is_delimited = sink, False, False
        started = time.perf_counter()
        self._transport.write(request)
        try:
            ended = await self._ended
        except BaseException:
            self.close()
            raise
        finally:
            self._ended = None
        self._num_exchanges += 1
        return Response(self._parser.get_status_code(), started, ended)

    def close(self) -> None:
        """End the connection at once."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_reusable = True

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._now = time.perf_counter()
        self._has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ExchangeError("the server switched protocols"))
        except httptools.HttpParserError as error:
            self._fail(ExchangeError(f"not an HTTP answer: {error.__context__ or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side, or we, closed."""
        self.is_reusable = False
        if self._ended is None or self._ended.done():
            return
        if not self._has_answer and self._num_exchanges:
            self._ended.set_exception(DroppedConnectionError("the server closed a kept connection"))
        elif self._has_answer and not self._is_delimited and exc is None:
            self._ended.set_result(time.perf_counter())
        else:
            self._ended.set_exception(ExchangeError(f"the connection was lost: {exc or 'closed by the server'}"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        """All headers are read; without a length the body ends with the connection."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._sink is not None:
            self._sink.feed(data, self._now)

    def on_message_complete(self) -> None:
        """The answer has ended."""
        if not self._parser.should_keep_alive():
            self.is_reusable = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self._now)

    def _fail(self, error: ExchangeError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()


class HttpClient:
    """Sends requests to one server. Keeps idle connections for the next request; opens as many as there are callers."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str] | None = None):
        self._endpoint = endpoint
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if endpoint.is_tls else None

    async def __aenter__(self) -> Self:
        """Nothing is opened yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, path: str, body: bytes, sink: BodySink) -> Response:
        """POST a JSON body. Raises ExchangeError or OSError; the caller bounds the time."""
        head = (
            f"POST {self._endpoint.base_path}{path} HTTP/1.1\r\nHost: {self._endpoint.authority}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{self._headers}\r\n"
        )
        return await self._exchange(head.encode("latin-1") + body, sink)

    async def get(self, path: str, sink: BodySink) -> Response:
        """GET. Raises ExchangeError or OSError; the caller bounds the time."""
        head = (
            f"GET {self._endpoint.base_path}{path} HTTP/1.1\r\nHost: {self._endpoint.authority}\r\n{self._headers}\r\n"
        )
        return await self._exchange(head.encode("latin-1"), sink)

    async def _exchange(self, request: bytes, sink: BodySink) -> Response:
        connection = self._pop_idle() or await self._open()
        try:
            response = await connection.exchange(request, sink)
        except DroppedConnectionError:
            connection = await self._open()
            response = await connection.exchange(request, sink)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _pop_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_SECS):
            _, connection = await loop.create_connection(
                _Connection, self._endpoint.host, self._endpoint.port, ssl=self._tls
            )
        return connection
