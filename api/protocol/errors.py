"""The error envelope of every OpenAI-style route, and the errors that fill it. Raised anywhere in `api/`.

ApiError
├── InvalidRequestError 400   AuthenticationError 401   NotFoundError 404
├── PayloadTooLargeError 413  UnsupportedMediaTypeError 415  RequestTimeoutError 408
├── OverloadedError 429       UnavailableError 503      InternalError 500
"""

from collections.abc import Mapping


class ApiError(Exception):
    """An answer other than 200. `message` goes to the client: no paths, keys, traces or prompt text in it."""

    status = 500
    kind = "internal_server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        status: int | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status is not None:
            self.status = status

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    """The request itself is wrong."""

    status = 400
    kind = "invalid_request_error"


class AuthenticationError(ApiError):
    """No key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class NotFoundError(ApiError):
    """Unknown route or model."""

    status = 404
    kind = "not_found_error"


class RequestTimeoutError(ApiError):
    """The body did not arrive, or the answer was not ready, in time."""

    status = 408
    kind = "timeout_error"


class PayloadTooLargeError(ApiError):
    """The body is over the limit."""

    status = 413
    kind = "invalid_request_error"


class UnsupportedMediaTypeError(ApiError):
    """Not JSON, or compressed."""

    status = 415
    kind = "invalid_request_error"


class OverloadedError(ApiError):
    """The queue is full."""

    status = 429
    kind = "rate_limit_error"


class InternalError(ApiError):
    """A bug or a dead engine; details are in the log alone."""

    status = 500
    kind = "internal_server_error"


class UnavailableError(ApiError):
    """Warming up, draining, or without a live engine."""

    status = 503
    kind = "service_unavailable_error"
