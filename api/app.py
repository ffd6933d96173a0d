"""Puts the Quart application together: routes, error handlers, the edge around them.

Called by `api/supervisor.py` and by tests.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from api import refusals
from api.auth import Authenticator
from api.edge import AsgiApp, Edge
from api.logs import get_logger
from api.protocol.errors import ApiError, InvalidRequestError
from api.request_context import request_context
from api.routes import admin, operations
from api.server_state import ServerState

logger = get_logger("api.app")


Register = Callable[[Quart, ServerState], None]


def create_app(
    state: ServerState, client_keys: Iterable[str] | None = None, routes: Sequence[Register] | None = None
) -> Quart:
    """The application of one server.

    Args:
        state: what the routes share. client_keys: by default those of the configuration, without the key file's.
        routes: what registers the routes that need a model; by default all of `api/routes/`.
    """
    app = Quart("twinmesh", static_folder=None, template_folder=None)
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    # The edge limits bodies in size and time; streams may take as long as a request may.
    app.config.update(
        MAX_CONTENT_LENGTH=None, BODY_TIMEOUT=None, RESPONSE_TIMEOUT=None, MAX_FORM_PARTS=1, PROPAGATE_EXCEPTIONS=False
    )
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.json.compact = True  # type: ignore[attr-defined]
    for register in (operations.register, admin.register, *(model_routes() if routes is None else routes)):
        register(app, state)
    _register_error_handlers(app)

    @app.before_serving
    async def attach_loop() -> None:
        state.bridge.attach(asyncio.get_running_loop())

    admin_keys = [key.get_secret_value() for key in state.config.admin_keys]
    if client_keys is None:
        client_keys = [key.get_secret_value() for key in state.config.api_keys]
    inner = cast(AsgiApp, app.asgi_app)
    edge = Edge(app, inner, state, Authenticator(client_keys, admin_keys))
    app.asgi_app = edge  # type: ignore[method-assign, assignment]
    return app


def model_routes() -> Sequence[Register]:
    """What registers the routes that need a model."""
    from api.routes import chat, completions, models, tokenize

    return chat.register, completions.register, models.register, tokenize.register


def _register_error_handlers(app: Quart) -> None:
    app.register_error_handler(ApiError, _answer_error)
    app.register_error_handler(HTTPException, _answer_http_exception)
    app.register_error_handler(Exception, _answer_exception)


async def _answer_error(error: Any) -> Response:
    request_context(request.scope).error_code = error.code or error.kind
    headers, body = refusals.encode(error)
    response = Response(body, status=error.status)
    for name, value in headers:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response


async def _answer_http_exception(error: Any) -> Response:
    """What werkzeug refuses that the edge let through."""
    if isinstance(error, NotFound):
        return await _answer_error(refusals.not_found())
    if isinstance(error, MethodNotAllowed):
        return await _answer_error(refusals.method_not_allowed(list(error.valid_methods or ())))
    if error.code is not None and 400 <= error.code < 500:
        return await _answer_error(InvalidRequestError("The request cannot be read.", status=error.code))
    return await _answer_exception(error)


async def _answer_exception(error: Exception) -> Response:
    context = request_context(request.scope)
    logger.error("a route failed", exc_info=error, request_id=context.request_id, route=context.route)
    return await _answer_error(refusals.internal_error())
