"""The errors that the edge answers with, and how any `ApiError` becomes bytes.

Used by `api/edge.py`, `api/request_body.py`, `api/http_protocol.py` and the error handlers of `api/app.py`. A message
never quotes the request.
"""

import json
from http import HTTPStatus

from api.protocol.errors import (
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedMediaTypeError,
)

Header = tuple[bytes, bytes]
CLOSE = {"Connection": "close"}


def encode(error: ApiError) -> tuple[list[Header], bytes]:
    """Headers (content type and length included) and body of the answer."""
    body = json.dumps(error.envelope()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    return headers, body


def raw_response(error: ApiError) -> bytes:
    """The whole HTTP/1.1 answer, for a connection that has no request to answer. It says that it closes."""
    headers, body = encode(error)
    kept = [header for header in headers if header[0] != b"connection"]
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in (*kept, (b"connection", b"close"))]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def closes(error: ApiError) -> bool:
    """Whether the connection ends with this answer."""
    return error.headers.get("Connection") == "close"


def missing_key() -> ApiError:
    """401, with the scheme that RFC 9110 (11.6.1) asks for."""
    message = "An API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    return AuthenticationError(message, code="missing_api_key", headers={"WWW-Authenticate": "Bearer"})


def wrong_key() -> ApiError:
    """401."""
    message = "The API key is not valid here."
    return AuthenticationError(message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def not_found() -> ApiError:
    """404 for a path that is no route."""
    return NotFoundError("There is no such route.", code="unknown_route")


def method_not_allowed(allowed: list[str]) -> ApiError:
    """405 with the methods that the route has."""
    methods = ", ".join(sorted(allowed))
    message = f"This route takes {methods}."
    return InvalidRequestError(message, status=405, code="method_not_allowed", headers={"Allow": methods})


def not_ready(reason: str, retry_after_secs: int) -> ApiError:
    """503 with Retry-After."""
    return UnavailableError(f"Not ready: {reason}.", code="not_ready", headers={"Retry-After": str(retry_after_secs)})


def body_too_large(limit: int) -> ApiError:
    """413."""
    return PayloadTooLargeError(f"The body is larger than {limit} bytes.", code="body_too_large", headers=CLOSE)


def too_slow(what: str) -> ApiError:
    """408."""
    return RequestTimeoutError(f"The {what} did not come in time.", code="request_timeout", headers=CLOSE)


def unsupported_media_type(message: str) -> ApiError:
    """415."""
    return UnsupportedMediaTypeError(message, code="unsupported_media_type", headers=CLOSE)


def malformed_http() -> ApiError:
    """400 for what is not HTTP."""
    return InvalidRequestError("The request is not valid HTTP.", code="malformed_http", headers=CLOSE)


def headers_too_large() -> ApiError:
    """431 (RFC 6585)."""
    return InvalidRequestError("The headers are too large.", status=431, code="headers_too_large", headers=CLOSE)


def internal_error() -> ApiError:
    """500; what went wrong is in the log under the request's id."""
    message = "Something went wrong in the server. Its log has the details under this X-Request-Id."
    return InternalError(message, code="internal_error")
