"""What is noted about one HTTP request, for its log line. Made by `api/edge.py`, filled in by the routes.

A route gets it by `request_context(quart.request.scope)` and sets what it knows. It never holds a prompt, an answer, a
key, a header or a query string.
"""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCOPE_KEY = "twinmesh.request"

_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """One request, from its headers to the end of its answer. Belongs to the event loop.

    Attributes:
        request_id: the client's `X-Request-Id` if it is fit to be echoed, else one of ours. Never used as a key.
        method, route: `route` is the rule that matched, such as `/v1/models/<id>`, not what the client wrote.
        started_at: seconds of `time.monotonic`.
        admitted: whether the engine has taken (part of) the call. Until then an error answer counts as a refusal.
        stream, num_choices, priority, prompt_tokens, completion_tokens, cached_tokens: None where they mean nothing.
        first_token_at: seconds of `time.monotonic`. finish_reasons: of the choices, in order.
        tenant: whose key came with it, under a name that tells nothing of the key; None without keys.
        error_code: the `code` or `type` of the error envelope that was sent.
    """

    request_id: str
    method: str = ""
    route: str = ""
    started_at: float = field(default_factory=time.monotonic)
    admitted: bool = False
    stream: bool | None = None
    num_choices: int | None = None
    priority: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_at: float | None = None
    finish_reasons: tuple[str, ...] = ()
    tenant: str | None = None
    error_code: str | None = None

    def log_fields(self, now: float) -> dict[str, object]:
        """Everything known, as fields of a log line."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "duration_ms": round((now - self.started_at) * 1000, 1),
        }
        for name in ("stream", "num_choices", "priority", "prompt_tokens", "completion_tokens", "cached_tokens"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        if self.first_token_at is not None:
            fields["ttft_ms"] = round((self.first_token_at - self.started_at) * 1000, 1)
        if self.finish_reasons:
            fields["finish_reasons"] = ",".join(self.finish_reasons)
        if self.error_code is not None:
            fields["error"] = self.error_code
        return fields


def request_context(scope: Mapping[str, Any]) -> RequestContext:
    """The context of the request that an ASGI scope belongs to; a fresh one where the edge was left out."""
    context = scope.get(SCOPE_KEY)
    return context if isinstance(context, RequestContext) else RequestContext(new_request_id())


def new_request_id() -> str:
    """An id of ours."""
    return f"req-{secrets.token_hex(12)}"


def choose_request_id(given: list[bytes]) -> str:
    """The client's id if there is exactly one and it is 1 to 128 visible ASCII characters, else one of ours."""
    if len(given) == 1 and _VISIBLE_ASCII.fullmatch(given[0]):
        return given[0].decode("ascii")
    return new_request_id()
