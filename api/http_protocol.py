"""uvicorn's HTTP/1.1 connection with limits that it lacks: on the size, number and time of headers.

Given to uvicorn by `api/supervisor.py`. The parser (llhttp, strict) refuses ambiguous framing itself: both
Content-Length and Transfer-Encoding, two lengths, a signed length, bad chunks (RFC 9112, 6.3 and 7.1). Such a
connection gets one answer in our envelope here and is closed.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.protocol.errors import ApiError
from api.refusals import headers_too_large, malformed_http, raw_response, too_slow

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 128
HEADER_TIMEOUT_SECS = 20.0
UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class _Refused(Exception):
    """Stops the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self._reads_headers = True
        self._made_progress = False
        self._declines_upgrade = False
        self._header_bytes = self._unparsed_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come. Answers and closes by itself what is no HTTP or over a limit."""
        if self.transport.is_closing():
            return
        self._made_progress = False
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(headers_too_large() if self._is_over_limit() else malformed_http())
        if self._made_progress or self.transport.is_closing():
            return
        # A header or trailer line that never ends is kept by the parser, unseen by `on_header`: count what it was fed.
        self._unparsed_bytes += len(data)
        if self._unparsed_bytes > MAX_HEADER_BYTES:
            self._refuse(headers_too_large())

    def on_message_begin(self) -> None:
        """The parser's: a request begins."""
        super().on_message_begin()
        self._progress()
        self._reads_headers = True
        self._header_bytes = 0
        if self._header_timer is None:
            self._start_header_timer()

    def on_body(self, body: bytes) -> None:
        """The parser's: a piece of a body."""
        self._progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser's: a request is complete."""
        self._progress()
        if not self._declines_upgrade:
            super().on_message_complete()

    def on_url(self, url: bytes) -> None:
        """The parser's: a piece of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's: a whole header or trailer line."""
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADERS:
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser's: the headers are complete; the request goes to the application."""
        self._progress()
        if self.parser.get_http_version() not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise _Refused
        if self.parser.should_upgrade():
            # The parser would skip the body. The request is taken up again without the offer.
            self._declines_upgrade = True
            return
        self._reads_headers = False
        self._stop_header_timer()
        super().on_headers_complete()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Decline an upgrade as RFC 9110 (7.8) allows, by answering as if it had not been offered."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name not in UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._declines_upgrade = False
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _is_over_limit(self) -> bool:
        return self._header_bytes > MAX_HEADER_BYTES or len(self.headers or ()) >= MAX_HEADERS

    def _progress(self) -> None:
        self._made_progress = True
        self._unparsed_bytes = 0

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _Refused

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer is under way already, and close."""
        self._stop_header_timer()
        cycle: Any = self.cycle
        is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if not is_answering:
            self.transport.write(raw_response(error))
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECS, self._header_time_out)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_time_out(self) -> None:
        self._header_timer = None
        if not self._reads_headers or self.transport.is_closing():
            return
        if self._unparsed_bytes or self._header_bytes:
            self._refuse(too_slow("headers"))
        else:
            self.transport.close()
