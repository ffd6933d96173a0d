"""Logging to stderr: JSON lines, or a readable console when stderr is a terminal. Set up once by `api/serve.py`.

Every record of the process passes through here, uvicorn's and the model's too. What a client sends can neither forge a
line (control characters are escaped) nor end up in one: no prompt, key, header or query string is ever a field, and the
message of an exception in the API, which may quote its input, is left out of its traceback.
"""

import logging
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.types import EventDict, Processor

WARNING_INTERVAL_SECS = 60.0
MAX_WARNING_KEYS = 256

# Loggers whose exceptions never quote a request: their messages are kept.
_OWN_WORDS = ("model", "kernels", "scheduler", "api.serve", "api.launch", "jax")


class _Stderr:
    """The present `sys.stderr` (a progress bar may have put itself in between), as a stream."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure(level: str = "info", output_format: str = "auto", stream: TextIO | None = None) -> None:
    """Route every logger of the process to `stream` (stderr).

    Args:
        level: debug, info, warning or error. output_format: json, console, or auto (console on a terminal).
    """
    as_json = output_format == "json" or (output_format == "auto" and not (stream or sys.stderr).isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _exception_without_input,
    ]
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        final.append(structlog.processors.JSONRenderer(ensure_ascii=True, default=repr))
    else:
        colours = (stream or sys.stderr).isatty()
        final += [_escape_control_characters, structlog.dev.ConsoleRenderer(colors=colours)]
    handler = logging.StreamHandler(stream or _Stderr())
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    _quieten(level)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _quieten(level: str) -> None:
    """Let the servers' loggers propagate to ours; keep those that are chatty, or that print URLs, to warnings."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "quart.app", "quart.serving"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.access").disabled = True
    if level == "error":
        return
    for name in ("uvicorn", "uvicorn.error", "asyncio", "jax", "orbax", "absl", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose calls take an event and fields: `log.info("request", status=200)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def describe_exception(error: BaseException, keep_message: bool) -> str:
    """Type and frames of an exception and of what caused it; its message only if asked for."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 5:
        frames = "".join(traceback.format_tb(current.__traceback__))
        message = f": {current}" if keep_message else ""
        parts.append(f"{frames}{type(current).__name__}{message}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n".join(reversed(parts))


def _exception_without_input(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Turn `exc_info` into the field `exception`, leaving out words that could be a client's."""
    info = event.pop("exc_info", None)
    if not info:
        return event
    error = _exception_of(info)
    if error is not None:
        name = str(event.get("logger", ""))
        event["exception"] = describe_exception(error, any(_is_below(name, prefix) for prefix in _OWN_WORDS))
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        record.exc_info = record.exc_text = None
    return event


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _exception_of(
    info: bool | BaseException | tuple[type[BaseException], BaseException, TracebackType | None],
) -> BaseException | None:
    if isinstance(info, BaseException):
        return info
    if isinstance(info, tuple):
        return info[1]
    return sys.exc_info()[1]


def _escape_control_characters(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """No value but a traceback may start a new line or move the cursor."""
    for key, value in event.items():
        if isinstance(value, str) and key != "exception" and not value.isprintable():
            event[key] = value.encode("unicode_escape").decode("ascii")
    return event


class RateLimitedWarnings:
    """Warnings that a client can provoke at will: one per key and interval, which says how many were left out.

    Belongs to one thread. Keys are names from our own code, never a client's words.
    """

    def __init__(self, interval_secs: float = WARNING_INTERVAL_SECS, clock: Callable[[], float] = time.monotonic):
        self._interval = interval_secs
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}
        self._logger = get_logger("api.warnings")

    def warn(self, key: str, message: str, **fields: object) -> bool:
        """Log `message`, unless one with this key was logged within the interval. Whether it was logged."""
        now = self._clock()
        last, left_out = self._seen.get(key, (None, 0))
        if (last is not None and now - last < self._interval) or (last is None and len(self._seen) >= MAX_WARNING_KEYS):
            if last is not None:
                self._seen[key] = (last, left_out + 1)
            return False
        self._seen[key] = (now, 0)
        if left_out:
            fields["repeated"] = left_out
        self._logger.warning(message, **fields)
        return True
