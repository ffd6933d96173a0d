"""`python -m api.serve`: reads the configuration, opens the port, loads the model, serves, drains, exits.

The main thread runs the event loop with uvicorn in it; the model is loaded in one thread and run in another. HTTP
answers from the start, so that /health is 200 and /ready is 503 while the model is on its way.

Exit codes: 0 after a drain, 2 for a bad configuration, 1 for everything else.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from api import logs
from api.config import ServerConfig
from api.config_loading import Launch, load, to_yaml
from api.config_sources import SECRET_KEYS, ConfigError, variable_name

if TYPE_CHECKING:
    from api.supervisor import Supervisor

EXIT_OK, EXIT_FAILURE, EXIT_BAD_CONFIG = 0, 1, 2
BACKLOG = 2048
# Threads that may be deep in the device's runtime when the server ends.
DEVICE_THREADS = ("model-loader", "engine", "warm-up")


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole life of a server; returns the exit code."""
    try:
        launch = load(sys.argv[1:] if arguments is None else arguments, os.environ)
    except ConfigError as error:
        print(f"bad configuration: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if launch.print_config:
        print(to_yaml(launch.config), end="")
        return EXIT_OK
    # Not for the eyes of the programs that are started from here.
    for name in SECRET_KEYS:
        os.environ.pop(variable_name(name), None)
    logs.configure(launch.config.log_level, launch.config.log_format)
    try:
        listener = bind(launch.config)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"cannot listen on {launch.config.host} port {launch.config.port}: {reason}", file=sys.stderr)
        return EXIT_FAILURE
    return _run(launch, listener)


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket, taken before the model is loaded so that a port in use fails at once. Raises OSError."""
    host = config.host.strip("[]")
    family, _, _, _, address = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _run(launch: Launch, listener: socket.socket) -> int:
    # Not above: `--help` and a bad configuration should not wait for these.
    import prometheus_client
    import uvloop

    from api.supervisor import Supervisor

    # Times of creation, which nobody asked for, would add a third to every scrape.
    prometheus_client.disable_created_metrics()
    try:
        supervisor = Supervisor(launch, listener)
    except ConfigError as error:
        print(f"bad configuration: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    handled = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, _SignalHandler(supervisor)) for number in handled}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(supervisor.run())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code


class _SignalHandler:
    """The first signal asks for a drain, a second one ends the process where it stands. Runs on the main thread."""

    def __init__(self, supervisor: "Supervisor"):
        self._supervisor = supervisor

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._supervisor.request_stop(signal.Signals(number).name):
            os._exit(EXIT_FAILURE)


def _end(code: int) -> None:
    """Exit, also when a thread of ours hangs in the device's runtime: nothing that matters is left to be done."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name.startswith(DEVICE_THREADS) for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _end(main())
