"""Everything that happens to a request before a route sees it, and to its answer on the way out. Wraps the Quart app.

In order: an id for the request, the key, the route (404, 405), readiness (503), the body's type, size and time (415,
413, 408). Plain ASGI, so that nothing is parsed or read for a caller who may not call. One line is logged per request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from quart import Quart
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import MapAdapter

from api import refusals
from api.auth import OPEN_ROUTES, OPERATIONS_ROUTES, Authenticator, Verdict
from api.cors import CorsPolicy
from api.logs import get_logger
from api.protocol.errors import ApiError
from api.refusals import Header
from api.request_body import (
    ClientGone,
    Message,
    Receive,
    check_media_type,
    discard_rest,
    header_values,
    read_body,
    replay,
)
from api.request_context import SCOPE_KEY, RequestContext, choose_request_id
from api.server_state import ServerState

Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

RETRY_AFTER_SECS = 5
CLIENT_GONE_STATUS = 499
QUIET_ROUTES = OPEN_ROUTES | {"/metrics"}

logger = get_logger("api.request")


class Edge:
    """The ASGI application that uvicorn runs. One per server; holds nothing that changes but a cached route table."""

    def __init__(self, app: Quart, inner: AsgiApp, state: ServerState, authenticator: Authenticator):
        self._app = app
        self._inner = inner
        self._state = state
        self._authenticator = authenticator
        self._cors = CorsPolicy(state.config.cors_origins)
        self._adapter: MapAdapter | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request, or the server's lifespan."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._inner(scope, receive, send)

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        context = RequestContext(choose_request_id(header_values(headers, b"x-request-id")), scope["method"])
        scope[SCOPE_KEY] = context
        origin = next(iter(header_values(headers, b"origin")), None)
        reply = _Reply(send, [(b"x-request-id", context.request_id.encode()), *self._cors.response_headers(origin)])
        reply.close = self._state.draining
        try:
            preflight = self._cors.preflight_headers(origin, headers) if context.method == "OPTIONS" else None
            if preflight is not None:
                await reply.send_plain(204, preflight)
            else:
                await self._pass_on(scope, context, receive, reply)
        except ApiError as error:
            context.error_code = error.code
            await reply.send_error(error, receive)
        except ClientGone:
            reply.client_gone = True
        except asyncio.CancelledError:
            reply.client_gone = not reply.is_complete
            raise
        except Exception:
            logger.exception("a request failed", request_id=context.request_id, route=context.route)
            context.error_code = "internal_error"
            if reply.status is None:
                await reply.send_error(refusals.internal_error(), receive)
            else:
                raise
        finally:
            self._note_end(context, reply)

    async def _pass_on(self, scope: dict[str, Any], context: RequestContext, receive: Receive, reply: "_Reply") -> None:
        verdict = self._authenticator.check(scope["path"], scope["headers"])
        if verdict is not Verdict.ALLOWED:
            raise refusals.missing_key() if verdict is Verdict.MISSING else refusals.wrong_key()
        context.tenant = self._authenticator.tenant(scope["headers"])
        context.route = self._route(scope["path"], context.method)
        is_call = context.method == "POST"
        if is_call or context.route not in OPEN_ROUTES | OPERATIONS_ROUTES:
            self._check_ready(is_call)
        body = b""
        if is_call:
            check_media_type(scope["headers"])
            limits = self._state.limits
            body = await read_body(receive, scope["headers"], limits.max_body_bytes, limits.body_timeout_secs)
        with self._state.open_request() if is_call else nullcontext():
            watched = _Watched(replay(body, receive))
            await self._inner(scope, watched.receive, reply.send)
        reply.client_gone = watched.client_gone and not reply.is_complete

    def _route(self, path: str, method: str) -> str:
        """The rule that matches. Raises ApiError (404, 405)."""
        if self._adapter is None:
            self._adapter = self._app.url_map.bind("localhost")
        try:
            rule, _ = self._adapter.match(path, method, return_rule=True)
        except MethodNotAllowed as error:
            raise refusals.method_not_allowed(list(error.valid_methods or ())) from None
        except HTTPException:
            raise refusals.not_found() from None
        return str(rule.rule)

    def _check_ready(self, is_call: bool) -> None:
        """Calls need a live engine that takes requests; looking at models needs one that was there."""
        reason = self._state.refusal_reason()
        if reason is not None and (is_call or not self._state.is_attached):
            raise refusals.not_ready(reason, RETRY_AFTER_SECS)

    def _note_end(self, context: RequestContext, reply: "_Reply") -> None:
        status = CLIENT_GONE_STATUS if reply.client_gone else reply.status or CLIENT_GONE_STATUS
        if status >= 400 and not context.admitted and context.route not in OPEN_ROUTES:
            self._state.metrics.on_refused(status)
        log = logger.debug if context.route in QUIET_ROUTES else logger.info
        log("request", status=status, **context.log_fields(time.monotonic()))


class _Watched:
    """An ASGI `receive` that remembers whether the client went away."""

    __slots__ = ("_receive", "client_gone")

    def __init__(self, receive: Receive):
        self._receive = receive
        self.client_gone = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_gone = True
        return message


class _Reply:
    """The answer on its way out: adds headers to its start and knows how far it has come."""

    __slots__ = ("_headers", "_send", "client_gone", "close", "is_complete", "status")

    def __init__(self, send: Send, headers: list[Header]):
        self._send = send
        self._headers = headers
        self.close = False
        self.status: int | None = None
        self.is_complete = False
        self.client_gone = False

    async def send(self, message: Message) -> None:
        """Pass one ASGI message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = {name for name, _ in self._headers}
            kept = [header for header in message.get("headers", ()) if header[0].lower() not in ours]
            closing = [(b"connection", b"close")] if self.close else []
            message = {**message, "headers": [*kept, *self._headers, *closing]}
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def send_plain(self, status: int, headers: list[Header]) -> None:
        """An answer without a body."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_error(self, error: ApiError, receive: Receive) -> None:
        """An error answer. Where the connection must close, the rest of the body is read first, within bounds."""
        headers, body = refusals.encode(error)
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        if refusals.closes(error):
            await discard_rest(receive)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
