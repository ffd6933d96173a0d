"""Command-line options that the measuring commands share, and how such a command runs and ends."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from bench.targets import TargetError

INTERRUPTED = 130


def numbers(text: str) -> list[float]:
    """`1,8,32` → the numbers, all above 0."""
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < 1e6 for value in values):
        raise ValueError("must be above 0")
    return values


def positive_int(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value <= 0:
        raise ValueError("must be above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def add_load_options(parser: argparse.ArgumentParser, duration: float) -> None:
    """What is sent, for how long, and where the results go."""
    parser.add_argument("--model", help="the model's name in requests (the first that the server lists)")
    parser.add_argument("--prompt-len", type=positive_int, default=64, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--max-tokens", type=positive_int, default=64, help="tokens of each answer (%(default)s)")
    parser.add_argument("--duration", type=float, default=duration, help="seconds; none begins later (%(default)s)")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds for those in flight then (%(default)s)")
    parser.add_argument("--route", choices=["completions", "chat"], default="completions", help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--no-ignore-eos", action="store_true", help="for servers that do not know ignore_eos")
    parser.add_argument("--extra", type=json_object, default={}, help="JSON object added to every request")
    parser.add_argument("--seed", type=int, help="of prompts and arrivals (a new one each time)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def run_bounded(measurement: Coroutine[Any, Any, int]) -> int:
    """Run a measurement to its exit code; a message instead of a traceback for what the operator can mend."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(measurement)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
