"""Traces: JSON lines in Mooncake's format, read and written lazily; the server's own recordings are such traces too.

A line has `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids` (one for each block of 512
tokens), as in Qin et al., Mooncake, FAST 2025, and may have `block_size`, `priority`, `tenant`, `session` and
`max_new_tokens`. Other fields are left alone: a recording has more.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from scheduler.errors import ConfigError
from scheduler.policies.options import positive, whole
from scheduler.simulation.records import Arrival

BLOCK_SIZE = 512
# Refuses what is no time at all, NaN and infinity among it.
MAX_NUMBER = 1e18
# No model has more context; and the simulator makes token ids of a request's blocks, which must stay below this.
MAX_LENGTH = 1 << 20
MAX_TOKEN_ID = 1 << 60


def read_trace(path: str | Path) -> Iterator[Arrival]:
    """The requests of a file, in its order, one by one; empty lines are skipped.

    Requests that generated nothing (a recording has those that were aborted early) count as one token, the least that a
    request may have.

    Raises:
        ConfigError: with file, line and field; or the file cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield _arrival(json.loads(line), f"r{number - 1}")
                    except ConfigError as error:
                        raise ConfigError(f"{path}, line {number}: {error}") from None
                    except (ValueError, RecursionError):  # a number of too many digits is a plain ValueError
                        raise ConfigError(f"{path}, line {number}: not JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {reason}") from None


def write_trace(path: str | Path, arrivals: Iterable[Arrival]) -> int:
    """Write requests as a trace that `read_trace` gives back, ids aside. Returns how many. Raises OSError."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as stream:
        for arrival in arrivals:
            stream.write(json.dumps(_line(arrival)) + "\n")
            count += 1
    return count


class TraceWorkload:
    """The requests of a trace at `speedup` times their own rate, at most `limit` of them.

    A trace out of order (a recording writes a request when it ends) is put in order first. Times count from the first.
    """

    def __init__(self, path: str | Path, speedup: float = 1.0, limit: int | None = None):
        self._path = path
        self._speedup = positive("speedup", speedup)
        self._limit = None if limit is None else whole("limit", limit)

    def arrivals(self) -> Iterator[Arrival]:
        """All requests, in order. Reads the whole file when asked for the first."""
        ordered = sorted(read_trace(self._path), key=lambda arrival: arrival.time)
        if not ordered:
            raise ConfigError(f"{self._path}: holds no request")
        first = ordered[0].time
        for arrival in ordered[: self._limit]:
            yield _at((arrival.time - first) / self._speedup, arrival)

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        """Nothing follows."""
        return ()


def _at(time: float, arrival: Arrival) -> Arrival:
    return Arrival(
        arrival.request_id,
        time,
        arrival.input_length,
        arrival.output_length,
        arrival.hash_ids,
        arrival.block_size,
        arrival.max_new_tokens,
        arrival.priority,
        arrival.tenant,
        arrival.session,
    )


def _arrival(fields: object, request_id: str) -> Arrival:
    if not isinstance(fields, dict):
        raise ConfigError("not a JSON object")
    output_length = max(_whole(fields, "output_length", least=0), 1)
    bound = _whole(fields, "max_new_tokens", least=0) if fields.get("max_new_tokens") is not None else output_length
    priority = _number(fields, "priority") if fields.get("priority") is not None else 0.5
    if priority > 1:
        raise ConfigError(f"'priority' must be in [0, 1], not {priority:g}")
    input_length = _whole(fields, "input_length", least=1)
    block_size = _whole(fields, "block_size", least=1) if "block_size" in fields else BLOCK_SIZE
    return Arrival(
        request_id,
        _number(fields, "timestamp") / 1000.0,
        input_length,
        output_length,
        _hash_ids(fields.get("hash_ids"), input_length, block_size),
        block_size,
        max(bound, output_length),
        priority,
        _text(fields, "tenant"),
        _text(fields, "session"),
    )


def _number(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ConfigError(f"'{name}' must be a number that is not negative, not {value!r}")
    return float(value)


def _whole(fields: dict[str, object], name: str, least: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_LENGTH:
        raise ConfigError(f"'{name}' must be a whole number from {least} to {MAX_LENGTH}, not {value!r}")
    return value


def _hash_ids(value: object, input_length: int, block_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
        raise ConfigError("'hash_ids' must be a list of whole numbers that are not negative")
    num_blocks = -(-input_length // block_size)
    if len(value) > num_blocks:
        raise ConfigError(f"'hash_ids' has {len(value)} ids for {num_blocks} blocks; is 'block_size' right?")
    if max(value, default=0) >= MAX_TOKEN_ID // block_size:
        raise ConfigError(
            f"'hash_ids' must be less than {MAX_TOKEN_ID // block_size} for blocks of {block_size} tokens"
        )
    return tuple(value)


def _text(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"'{name}' must be text, not {value!r}")
    return value


def _line(arrival: Arrival) -> dict[str, object]:
    line: dict[str, object] = {
        "timestamp": arrival.time * 1000.0,
        "input_length": arrival.input_length,
        "output_length": arrival.output_length,
        "hash_ids": list(arrival.hash_ids),
        "block_size": arrival.block_size,
        "priority": arrival.priority,
    }
    if arrival.max_new_tokens is not None:
        line["max_new_tokens"] = arrival.max_new_tokens
    return line | {name: value for name in ("tenant", "session") if (value := getattr(arrival, name)) is not None}
