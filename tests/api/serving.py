"""A real HTTP server around the fake engine, for tests of everything but the generation routes themselves.

`served` runs one in a thread of the test's process, on a free port. `echo_routes` registers one stand-in route, POST
/v1/completions, which streams the tokens of one engine request. As a program (`python -m tests.api.serving`) it is
`api.serve` with both put in, for tests of signals and exit codes.
"""

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx
import uvicorn
from quart import Quart, Response, jsonify, request

from api.app import Register, create_app
from api.config import ServerConfig
from api.config_loading import resolve
from api.faults import ENGINE_STEP
from api.http_protocol import LimitedHttpProtocol
from api.launch import Launched, fault_point
from api.recording import open_recording
from api.request_context import request_context
from api.server_state import Limits, ModelFacts, ServerState
from scheduler import Event, FinishReason, Request
from tests.api.fake_engine import FakeEngine

FACTS = ModelFacts("fake-model", "1 × FAKE", {"kernels": {"attention": "fake"}})


def echo_routes(app: Quart, server: ServerState) -> None:
    """The stand-in. Body: `max_tokens`, `stream`, `prompt` (ids), `crash`."""

    @app.post("/v1/completions")
    async def completions() -> Response:
        body = await request.get_json()
        if body.get("crash"):
            raise RuntimeError(f"a message that quotes {body['crash']}")
        context = request_context(request.scope)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: Event) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        wanted = Request(
            context.request_id + str(time.monotonic()),
            body.get("prompt", [1, 2, 3]),
            body.get("max_tokens", 3),
            arrival_time=time.monotonic(),
            priority=body.get("priority", 0.5),
        )
        server.engine.submit([wanted], sink)
        context.admitted = True
        server.metrics.on_received(1, wanted.num_prompt_tokens)
        answer = _tokens(server, wanted, events)
        if body.get("stream"):
            response = Response(answer, content_type="text/event-stream")
            response.timeout = None
            return response
        text = "".join([piece async for piece in answer])
        return jsonify({"text": text})

    @app.get("/v1/models/<name>")
    async def model(name: str) -> Response:
        return jsonify({"id": server.model_name})


async def _tokens(server: ServerState, wanted: Request, events: "asyncio.Queue[Event]") -> AsyncIterator[str]:
    meter = server.metrics.meter(wanted)
    reason = FinishReason.ABORT
    try:
        while True:
            event = await events.get()
            if event.token_id is not None:
                meter.on_tokens(1, time.monotonic())
                yield f"data: {event.token_id}\n\n"
            if event.finish_reason is not None:
                reason = event.finish_reason
                yield f"data: {reason.value}\n\n"
                return
    finally:
        server.engine.abort(wanted.request_id)
        meter.on_finished(reason, time.monotonic())


def make_server(
    config: ServerConfig | None = None,
    *,
    engine: FakeEngine | None = None,
    limits: Limits | None = None,
    client_keys: Sequence[str] | None = None,
    routes: Sequence[Register] | None = (echo_routes,),
    attach: bool = True,
) -> tuple[Quart, ServerState, FakeEngine]:
    """An application whose engine runs."""
    config = config or resolve({})
    state = ServerState(config, limits=limits, recording=open_recording(config))
    engine = engine or FakeEngine(on_step_done=state.bridge.flush)
    app = create_app(state, client_keys, routes)
    if attach:
        state.attach(engine, cast(Any, object()), FACTS)
        engine.start()
    return app, state, engine


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int
    state: ServerState
    engine: FakeEngine

    def client(self) -> httpx.Client:
        """A client that keeps its connections."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", verify=False, trust_env=False, timeout=10)

    def exchange(self, raw: bytes, wait_secs: float = 5.0) -> bytes:
        """Send raw bytes on a connection of their own; everything that comes back until it is closed or time is up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait_secs) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(raw)
            return read_all(connection, wait_secs)


def read_all(connection: socket.socket, wait_secs: float) -> bytes:
    """What comes until the peer closes or `wait_secs` have passed."""
    received = bytearray()
    deadline = time.monotonic() + wait_secs
    try:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(65536)
            if not piece:
                break
            received += piece
    except OSError:
        pass
    return bytes(received)


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Served]:
    """Run `make_server(**options)` under uvicorn on a free port."""
    app, state, engine = make_server(**options)
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Served(listener.getsockname()[1], state, engine)
    finally:
        server.should_exit = True
        thread.join(10)
        engine.stop()
        state.close()


def _main() -> None:
    """`api.serve`, its model and routes replaced. The first argument is the length of a step in seconds, or `never`."""
    from api import serve, supervisor

    step = sys.argv.pop(1)

    def build(config: ServerConfig, on_step_done: Any, progress: Any) -> Launched:
        progress.start("loading weights", 1)
        if step == "never":
            time.sleep(3600)
        progress.finish()
        engine = FakeEngine(
            step_secs=float(step), on_step_done=on_step_done, before_step=fault_point(config, ENGINE_STEP)
        )
        return Launched(engine, engine.start, cast(Any, object()), FACTS)

    class FakeSupervisor(supervisor.Supervisor):
        def __init__(self, launch: Any, listener: socket.socket):
            super().__init__(launch, listener, build, (echo_routes,))

    supervisor.Supervisor = FakeSupervisor  # type: ignore[misc, assignment]
    serve._end(serve.main())


__all__ = ["Served", "echo_routes", "make_server", "read_all", "served"]

if __name__ == "__main__":
    _main()
