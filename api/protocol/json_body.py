"""Strict JSON: what Python's decoder would let through is refused here. Called for every request body.

Refused: NaN and infinities, numbers that overflow to them, integers of absurd length, duplicate keys, lone surrogates,
invalid UTF-8, a byte order mark, nesting beyond MAX_DEPTH, and a top level that is no object.
"""

import json
import math
from typing import Any

from api.protocol.errors import InvalidRequestError

MAX_INTEGER_DIGITS = 40

# What comes after the decoder (validation, chat templates) recurses; this is far below what any stack holds.
MAX_DEPTH = 64


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError("an integer is too long")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has a key twice")
    return result


_DECODER = json.JSONDecoder(
    parse_constant=_constant, parse_float=_float, parse_int=_int, object_pairs_hook=_object, strict=True
)


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether containers are nested in more than `depth` levels. Looks at one level after the other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        children = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in children if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def decode_object(body: bytes) -> dict[str, Any]:
    """A request body as a dictionary.

    Raises:
        InvalidRequestError: with the reason, never with the content.
    """
    if not body.strip():
        raise InvalidRequestError("the request body is empty; a JSON object is expected")
    try:
        value = _DECODER.decode(body.decode("utf-8"))
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise InvalidRequestError("the request body is nested too deeply")
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError("the request body is not valid UTF-8") from None
    except UnicodeEncodeError:
        raise InvalidRequestError("the request body contains a lone surrogate") from None
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error.msg} at position {error.pos}") from None
    except ValueError as error:
        raise InvalidRequestError(f"the request body is not acceptable: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    return value
