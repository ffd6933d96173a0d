"""The recording of a real run, switched on by the key `recording.path`: who takes it down, and when. docs/recording.md.

Made by `open_recording` before the model is loaded and held by `ServerState`. Requests come from the event loop through
recorders, steps from the engine's thread; a thread of its own turns them into lines. The files belong to
`api/recording_files.py`.
"""

import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from api.config import ServerConfig
from api.config_sources import ConfigError
from api.logs import get_logger
from api.pace import Pace
from api.recording_files import FORMAT, EndedRequest, RecordingFiles
from api.recording_names import MIN_KNOWN_PAGES, RecordingNames
from api.version import package_versions
from model.engine_types import StepRecord
from scheduler import FinishReason, Request

# Lines that may wait for the writer, which comes by every POLL_SECS and flushes what it wrote.
QUEUE_SIZE = 16384
POLL_SECS = 0.25
CLOSE_SECS = 3.0

logger = get_logger("api.recording")


def open_recording(config: ServerConfig) -> "Recording | None":
    """The recording that the configuration asks for, not begun, or None.

    Raises:
        ConfigError: its folder cannot be written to, or holds something.
    """
    if config.recording.path is None:
        return None
    folder = Path(config.recording.path)
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_empty = next(folder.iterdir(), None) is None
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError, ValueError) as error:
        raise _unusable(folder, error) from None
    if not is_empty:
        raise ConfigError(f"recording.path: {folder} is not empty, and a recording is never overwritten")
    return Recording(config, folder)


def _unusable(folder: Path, error: Exception) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"recording.path: {folder} cannot be written to ({reason})")


class RequestRecorder:
    """A `RequestFollower`; on the event loop. The request's end is put into the recording."""

    __slots__ = ("_first_token_at", "_has_ended", "_num_tokens", "_put", "_request")

    def __init__(self, request: Request, put: Callable[[EndedRequest], None]):
        self._request = request
        self._put = put
        self._num_tokens = 0
        self._first_token_at: float | None = None
        self._has_ended = False

    def on_queued(self, now: float) -> None:
        """Nothing: a line is written when all is known."""

    def on_tokens(self, count: int, now: float) -> None:
        """`count` more output tokens have come."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._num_tokens += count

    def on_finished(self, reason: FinishReason, now: float) -> None:
        """The request has ended. Later calls do nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._put(EndedRequest(self._request, self._num_tokens, self._first_token_at, now, reason))


class Recording:
    """One recording, into a folder that is there and empty.

    The engine's thread calls `on_step`; the event loop calls `recorder` and what that gives. These take about a
    microsecond, wait for nothing and never raise. `begin` and `close` block, `close` for at most its timeout.
    """

    def __init__(
        self,
        config: ServerConfig,
        folder: Path,
        queue_size: int = QUEUE_SIZE,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config
        self._folder = folder
        self._queue_size = queue_size
        self._clock = clock
        # Appending and popping are atomic: nobody waits for a lock.
        self._queue: deque[StepRecord | EndedRequest] = deque()
        # A counter for each of the two threads that add to them.
        self._num_dropped_steps = 0
        self._num_dropped_arrivals = 0
        self._has_warned = False
        self._is_on = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether lines are taken: from `begin` until `close`, or until a disk error or `max_bytes` ends it."""
        return self._is_on

    @property
    def num_dropped(self) -> int:
        """Lines that found the queue full."""
        return self._num_dropped_steps + self._num_dropped_arrivals

    def begin(self, model: str, device: str, num_pages: int) -> None:
        """Create the files and start the writer; time counts from here. Once, before the first request.

        Raises:
            ConfigError: the folder cannot be written to, or files of these names have appeared in it.
        """
        began_at = self._clock()
        page_size = self._config.kv_cache_config.page_size
        names = RecordingNames(page_size, max(MIN_KNOWN_PAGES, 2 * num_pages), Pace(self._closing.is_set))
        about = _about(self._config, model, device, num_pages)
        try:
            files = RecordingFiles(self._folder, self._config.recording.max_bytes, about, names, began_at)
        except OSError as error:
            raise _unusable(self._folder, error) from None
        self._is_on = True
        self._thread = threading.Thread(target=self._write, args=(files,), name="recording", daemon=True)
        self._thread.start()
        logger.info("recording", folder=str(self._folder))

    def on_step(self, record: StepRecord) -> None:
        """The engine's step listener."""
        if not self._put(record):
            self._num_dropped_steps += 1

    def recorder(self, request: Request) -> RequestRecorder:
        """What follows a request that is about to be submitted. If that is refused, nothing is written."""
        return RequestRecorder(request, self._on_end)

    def close(self, timeout_secs: float = CLOSE_SECS) -> None:
        """Write what has come, and close the files. Idempotent. A disk that hangs is left behind."""
        self._is_on = False
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_secs)
            if self._thread.is_alive():
                logger.warning("the recording could not be completed in time")

    def _on_end(self, ended: EndedRequest) -> None:
        if not self._put(ended):
            self._num_dropped_arrivals += 1

    def _put(self, entry: StepRecord | EndedRequest) -> bool:
        """Queue a line, or forget it if the recording has ended. False: the queue is full."""
        if not self._is_on:
            return True
        if len(self._queue) >= self._queue_size:
            return False
        self._queue.append(entry)
        return True

    def _write(self, files: RecordingFiles) -> None:
        """The writer's thread. Whatever goes wrong in it ends the recording and nothing else."""
        try:
            is_closing = False
            while not is_closing:
                is_closing = self._closing.wait(POLL_SECS)
                if not self._write_queued(files):
                    files.end("max_bytes", self.num_dropped, self._clock())
                    logger.warning("the recording has stopped: it has reached recording.max_bytes")
                    return
            files.end("closed", self.num_dropped, self._clock())
        except OSError as error:
            logger.error("the recording has stopped: its files cannot be written", reason=error.strerror or str(error))
        except Exception:
            logger.exception("the recording has stopped")
        finally:
            self._is_on = False
            files.close()
            self._queue.clear()

    def _write_queued(self, files: RecordingFiles) -> bool:
        """Write and flush what waits; False if there is no room for it. Raises OSError."""
        give_way = Pace(self._closing.is_set)
        for _ in range(len(self._queue)):
            if not files.write(self._queue.popleft()):
                return False
            give_way()
        files.flush()
        if self.num_dropped and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the recording has a gap: lines came faster than they could be written", queue=self._queue_size
            )
        return True


def _about(config: ServerConfig, model: str, device: str, num_pages: int) -> dict[str, object]:
    """What `about.json` says at the start."""
    cache = config.kv_cache_config
    return {
        "format": FORMAT,
        "began_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "model": model,
        "device": device,
        "dtype": config.dtype,
        "mesh": {"tp": config.mesh.tp, "dp": config.mesh.dp, "ep": config.mesh.ep},
        "max_model_len": config.max_model_len,
        "page_size": cache.page_size,
        "num_pages": num_pages,
        "enable_prefix_reuse": cache.enable_prefix_reuse,
        "scheduler_config": config.scheduler_config.model_dump(mode="json"),
        "versions": package_versions(),
        "end": None,
    }
