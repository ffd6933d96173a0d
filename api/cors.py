"""Which web pages may call the server from a browser (the Fetch standard's CORS protocol). Used by `api/edge.py`.

Without `cors_origins` there are none, and no header of this kind is ever sent.
"""

import re
from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")
MAX_AGE_SECS = 600


class CorsPolicy:
    """The origins that are let in. Immutable."""

    def __init__(self, origins: Iterable[str]):
        self._origins = frozenset(origin.encode() for origin in origins)

    def response_headers(self, origin: bytes | None) -> list[Header]:
        """What to add to an answer to a request with this `Origin`."""
        if not self._origins:
            return []
        headers = [(b"vary", b"Origin")]
        if origin is not None and self._allows(origin):
            headers.append((b"access-control-allow-origin", origin))
            headers.append((b"access-control-expose-headers", b"x-request-id, retry-after"))
        return headers

    def preflight_headers(self, origin: bytes | None, headers: Sequence[Header]) -> list[Header] | None:
        """Answer headers (beside `response_headers`) of an allowed preflight, or None if it is not one.

        A browser sends no key with a preflight, and the answer tells nothing but that the origin is known.
        """
        if (
            origin is None
            or not self._allows(origin)
            or not any(n == b"access-control-request-method" for n, _ in headers)
        ):
            return None
        answer = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-max-age", str(MAX_AGE_SECS).encode()),
        ]
        wanted = [value for name, value in headers if name == b"access-control-request-headers"]
        if len(wanted) == 1 and _HEADER_NAMES.fullmatch(wanted[0]):
            answer.append((b"access-control-allow-headers", wanted[0]))
        return answer

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins
