"""One running server from its first request to its exit code: loading, serving, the drain, the death of the engine.

Run by `api/serve.py` on the event loop. It owns the uvicorn server, the thread that loads the model, and the order in
which all of it ends.
"""

import asyncio
import contextlib
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from api import launch as launching
from api.app import Register, create_app
from api.config import ServerConfig
from api.config_loading import Launch
from api.config_sources import ConfigError
from api.http_protocol import LimitedHttpProtocol
from api.launch import Launched
from api.logs import get_logger
from api.progress import BarProgress, LoggedProgress, make_progress
from api.recording import open_recording
from api.server_state import ServerState
from model.engine_types import EngineState
from model.errors import ModelError

KEEP_ALIVE_SECS = 75
POLL_SECS = 0.1
# After the engine's death: open requests get this long to hear of it, and monitors this long to see /ready say so.
DEATH_GRACE_SECS = 3.0
DEATH_NOTICE_SECS = 1.0
# After a drain that took too long: what is left hears of it, then is cut.
CUT_GRACE_SECS = 1.0
ENGINE_STOP_SECS = 2.0
HTTP_CLOSE_SECS = 4.0

logger = get_logger("api.serve")


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is the supervisor's decision."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class Supervisor:
    """One server process. `request_stop` may be called from a signal handler, the rest belongs to the event loop."""

    def __init__(
        self,
        launch: Launch,
        listener: socket.socket,
        build: Callable[..., Launched] = launching.build,
        routes: Sequence[Register] | None = None,
    ):
        """`build` and `routes` are for tests: what makes the engine, and what registers the routes that use it.

        Raises:
            ConfigError: the folder for the recording cannot be used.
        """
        self._config: ServerConfig = launch.config
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self._build = build
        self.state = ServerState(launch.config, recording=open_recording(launch.config))
        self._app = create_app(self.state, launch.client_keys, routes)
        self._needs_key = bool(launch.client_keys)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event = asyncio.Event()
        self._stop_requested = False
        self._engine_was_stopped = False

    def request_stop(self, why: str) -> bool:
        """Ask for a drain. False if that was asked for before."""
        if self._stop_requested:
            return False
        self._stop_requested = True
        self.state.begin_drain()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._announce_stop, why)
        return True

    async def run(self) -> int:
        """Serve until there is a reason not to; the exit code."""
        self._loop = asyncio.get_running_loop()
        if self._stop_requested:
            return 0
        server = _HttpServer(self._uvicorn_config())
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            return await self._supervise(serving)
        finally:
            await self._close(server, serving)

    def _announce_stop(self, why: str) -> None:
        logger.info("draining", reason=why, open_requests=self.state.num_open_requests)
        self._stop.set()

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECS,
            timeout_graceful_shutdown=1,
        )

    async def _supervise(self, serving: "asyncio.Task[None]") -> int:
        progress = make_progress()
        try:
            launched = await self._until_stop(self._load(progress), serving)
            if launched is None:
                return 0
            self.state.attach(launched.engine, launched.tokenizer, launched.facts)
            launched.start()
            while launched.engine.state not in (EngineState.READY, EngineState.DEAD) and not self._stop.is_set():
                await asyncio.sleep(POLL_SECS / 4)
        except ConfigError as error:
            print(f"bad configuration: {error}", file=sys.stderr)
            return 2
        except ModelError as error:
            logger.error("the model cannot be served", reason=str(error))
            return 1
        except Exception:
            logger.exception("the server could not start")
            return 1
        finally:
            progress.close()
        if launched.engine.state is EngineState.READY:
            self._announce_ready()
        return await self._watch(serving)

    def _load(self, progress: LoggedProgress | BarProgress) -> "asyncio.Future[Launched]":
        """Load in a thread that does not keep the process alive."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Launched] = loop.create_future()

        def deliver(result: Launched | None, error: BaseException | None) -> None:
            if loaded.done():
                return
            if result is not None:
                loaded.set_result(result)
            elif error is not None:
                loaded.set_exception(error)

        def work() -> None:
            outcome: tuple[Launched | None, BaseException | None]
            try:
                outcome = (self._build(self._config, self.state.bridge.flush, progress), None)
            except Exception as error:
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop is gone: the server was told to stop meanwhile
                loop.call_soon_threadsafe(deliver, *outcome)

        threading.Thread(target=work, name="model-loader", daemon=True).start()
        return loaded

    async def _until_stop[Result](
        self, wanted: "asyncio.Future[Result]", serving: "asyncio.Task[None]"
    ) -> Result | None:
        """What `wanted` brings, or None if the server was told to stop first. Raises if HTTP failed."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((wanted, stop, serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if wanted.done():
            return wanted.result()
        wanted.cancel()
        if serving.done() and not self._stop.is_set():
            raise RuntimeError("the HTTP server ended") from serving.exception()
        return None

    async def _watch(self, serving: "asyncio.Task[None]") -> int:
        """Until the drain is over or the engine is dead."""
        engine = self.state.engine
        gc.collect()
        gc.freeze()
        while not self._stop.is_set():
            if engine.state is EngineState.DEAD:
                return await self._mourn()
            if serving.done():
                logger.error("the HTTP server ended")
                return 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_SECS)
        if await self._until_idle(self._config.drain_timeout_secs):
            logger.info("drained")
        elif engine.state is not EngineState.DEAD:
            logger.warning("the drain took too long", open_requests=self.state.num_open_requests)
            await self._stop_engine()
            await self._until_idle(CUT_GRACE_SECS, even_if_dead=True)
            return 0
        return await self._mourn() if engine.state is EngineState.DEAD else 0

    async def _mourn(self) -> int:
        """The engine has died: let open requests hear of it, and end with a failure."""
        stats = self.state.engine.stats()
        logger.error("the engine died; the server ends", reason=stats.error, open_requests=self.state.num_open_requests)
        started_at = time.monotonic()
        await self._until_idle(DEATH_GRACE_SECS, even_if_dead=True)
        await asyncio.sleep(max(0.0, DEATH_NOTICE_SECS - (time.monotonic() - started_at)))
        return 1

    async def _until_idle(self, timeout_secs: float, even_if_dead: bool = False) -> bool:
        """Wait until no request is open; False if that takes too long or the engine dies."""
        deadline = time.monotonic() + timeout_secs
        while self.state.num_open_requests:
            is_dead = self.state.engine.state is EngineState.DEAD
            if time.monotonic() >= deadline or (is_dead and not even_if_dead):
                return False
            await asyncio.sleep(POLL_SECS / 2)
        return True

    async def _close(self, server: _HttpServer, serving: "asyncio.Task[None]") -> None:
        """Close the port and what is still open on it, stop the engine, complete the recording; bounded."""
        self.state.begin_drain()
        server.should_exit = True
        with contextlib.suppress(TimeoutError, Exception, SystemExit):
            await asyncio.wait_for(serving, HTTP_CLOSE_SECS)
        for connection in list(server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        await self._stop_engine()
        await asyncio.to_thread(self.state.close)

    async def _stop_engine(self) -> None:
        """End the engine's loop, once; open requests end with an error. One that hangs is left behind."""
        if self.state.is_attached and not self._engine_was_stopped:
            self._engine_was_stopped = True
            await asyncio.to_thread(self.state.engine.stop, ENGINE_STOP_SECS)

    def _announce_ready(self) -> None:
        host = self._config.host.strip("[]")
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self._port}"
        facts = self.state.facts
        logger.info("ready", url=url, model=self.state.model_name, device=facts.device)
        key = ' -H "Authorization: Bearer $TWINMESH_API_KEY"' if self._needs_key else ""
        body = f'{{"model": "{self.state.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        lines = [
            "",
            f"  Twinmesh is ready at {url}",
            f"  model   {self.state.model_name}",
            f"  device  {facts.device}",
            "",
            f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            "",
        ]
        with contextlib.suppress(OSError):
            print("\n".join(lines), flush=True)
