"""Who may call what. Built by `api/app.py` from the configured keys, asked by `api/edge.py` before all else.

Default deny: with keys configured, every request needs one but those for the open routes, unknown paths included. Keys
are compared by their SHA-256 in constant time, as bytes, so that neither their length nor their letters leak.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from enum import Enum

Headers = Sequence[tuple[bytes, bytes]]

OPEN_ROUTES = frozenset({"/health", "/ready"})
# Under this only an admin key counts.
ADMIN_PREFIX = "/admin/"
# Routes that tell of the server itself: an admin key opens these too, and no others.
OPERATIONS_ROUTES = frozenset({"/metrics", "/version", "/server_info", "/openapi.json"})


class Verdict(Enum):
    """What became of a request's credentials."""

    ALLOWED = "allowed"
    MISSING = "missing"
    WRONG = "wrong"


class Authenticator:
    """The keys of one server. Immutable; safe to share."""

    def __init__(self, client_keys: Iterable[str] = (), admin_keys: Iterable[str] = ()):
        self._client_digests = tuple(_digest(key.encode()) for key in client_keys)
        self._admin_digests = tuple(_digest(key.encode()) for key in admin_keys)

    @property
    def is_required(self) -> bool:
        """Whether any key is configured."""
        return bool(self._client_digests or self._admin_digests)

    def check(self, path: str, headers: Headers) -> Verdict:
        """Judge a request by its exact path and its raw headers (lower-case names)."""
        if path in OPEN_ROUTES or not self.is_required:
            return Verdict.ALLOWED
        presented = _presented_keys(headers)
        if not presented:
            return Verdict.MISSING
        accepted = self._client_digests
        if path.startswith(ADMIN_PREFIX):
            accepted = self._admin_digests
        elif path in OPERATIONS_ROUTES:
            accepted += self._admin_digests
        return Verdict.ALLOWED if _any_matches(presented, accepted) else Verdict.WRONG

    def tenant(self, headers: Headers) -> str | None:
        """A name for whose valid key a request carries, that tells nothing of the key; None without keys."""
        if not self.is_required:
            return None
        for key in _presented_keys(headers):
            if _any_matches([key], self._client_digests):
                return f"key-{_digest(b'tenant' + _digest(key)).hex()[:12]}"
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _any_matches(presented: Sequence[bytes], accepted: Sequence[bytes]) -> bool:
    """Compare every pair, found or not."""
    found = False
    for key in presented:
        digest = _digest(key)
        for known in accepted:
            found |= hmac.compare_digest(digest, known)
    return found


def _presented_keys(headers: Headers) -> list[bytes]:
    """`Authorization: Bearer KEY` and `x-api-key: KEY`; a header given twice counts for nothing."""
    bearer = [value for name, value in headers if name == b"authorization"]
    plain = [value for name, value in headers if name == b"x-api-key"]
    keys = []
    if len(bearer) == 1:
        scheme, _, key = bearer[0].strip().partition(b" ")
        if scheme.lower() == b"bearer" and key.strip():
            keys.append(key.strip())
    if len(plain) == 1 and plain[0].strip():
        keys.append(plain[0].strip())
    return keys
