"""The files of a recording: their lines, their size, how they end. Owned by the writer of `api/recording.py`.

A line holds counts, times and names made for this recording; no text and no token id comes in here but to be hashed.
docs/recording.md explains the format.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from api.recording_names import RecordingNames
from model.engine_types import StepRecord
from scheduler import FinishReason, Request
from scheduler.costs.samples import sample_line
from scheduler.simulation.records import StepSample

FORMAT = 1
ARRIVALS, STEPS, ABOUT = "arrivals.jsonl", "steps.jsonl", "about.json"
# Reading a sample back asks for more than 0.
MIN_SECONDS = 1e-9


class EndedRequest(NamedTuple):
    """A request that has ended: output tokens, when the first came (or None), when it ended, in seconds, and why."""

    request: Request
    num_tokens: int
    first_token_at: float | None
    ended_at: float
    finish_reason: FinishReason


class RecordingFiles:
    """Creates and owns the files. For one thread; every method blocks and, but for `close`, may raise OSError.

    Args:
        folder: where; none of the files may be there. max_bytes: of all lines together.
        about: what `about.json` says besides the end. began_at: seconds, from which the files' times count.
    """

    def __init__(
        self, folder: Path, max_bytes: int, about: Mapping[str, object], names: RecordingNames, began_at: float
    ):
        self._folder = folder
        self._bytes_left = max_bytes
        self._about = about
        self._names = names
        self._began_at = began_at
        self._counts = {ARRIVALS: 0, STEPS: 0}
        self._files: dict[str, TextIO] = {}
        try:
            for name in self._counts:
                self._files[name] = _create(folder / name)
            with _create(folder / ABOUT) as file:
                file.write(_pretty(about))
        except OSError:
            self.close()
            raise

    def write(self, entry: StepRecord | EndedRequest) -> bool:
        """Add a line; False, and no line, if that would be more than `max_bytes`."""
        if isinstance(entry, StepRecord):
            name, line = STEPS, self._step_line(entry)
        else:
            name, line = ARRIVALS, self._arrival_line(entry)
        size = len(line) + 1  # in ASCII
        if size > self._bytes_left:
            return False
        self._files[name].write(line + "\n")
        self._bytes_left -= size
        self._counts[name] += 1
        return True

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        for file in self._files.values():
            file.flush()

    def end(self, reason: str, num_dropped: int, now: float) -> None:
        """Flush, and say in `about.json` how the recording ended."""
        self.flush()
        end = {
            "reason": reason,
            "after_ms": self._milliseconds(now),
            "arrivals": self._counts[ARRIVALS],
            "steps": self._counts[STEPS],
            "dropped": num_dropped,
        }
        complete = self._folder / f"{ABOUT}.new"
        with _create(complete) as file:
            file.write(_pretty({**self._about, "end": end}))
        complete.replace(self._folder / ABOUT)

    def close(self) -> None:
        """Close the files, whatever state they are in."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _milliseconds(self, moment: float, since: float | None = None) -> float:
        """From the recording's begin, or from another moment; to the microsecond."""
        return round(max(0.0, moment - (self._began_at if since is None else since)) * 1000, 3)

    def _step_line(self, record: StepRecord) -> str:
        sample = StepSample(
            record.shape,
            record.num_padded_tokens,
            record.num_padded_rows,
            round(max(record.duration_secs, MIN_SECONDS), 9),
            record.started_after_idle,
        )
        return sample_line(sample, self._milliseconds(record.finished_at))

    def _arrival_line(self, ended: EndedRequest) -> str:
        request = ended.request
        arrived_at = request.arrival_time

        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else self._milliseconds(moment, arrived_at)

        values: dict[str, object] = {
            "timestamp": self._milliseconds(arrived_at),
            "input_length": request.num_prompt_tokens,
            "output_length": ended.num_tokens,
            "hash_ids": self._names.pages(request.prompt_token_ids, request.cache_salt),
            "block_size": self._names.page_size,
            "priority": request.priority,
            "max_new_tokens": request.max_new_tokens,
            "ttft_ms": since_arrival(ended.first_token_at),
            "e2e_ms": since_arrival(ended.ended_at),
            "queue_ms": since_arrival(request.first_started_at),
            "cached_tokens": request.num_cached_tokens,
            "finish_reason": ended.finish_reason.value,
            "num_preemptions": request.num_preemptions,
        }
        if request.tenant is not None:
            values["tenant"] = self._names.tenant(request.tenant)
        return json.dumps(values)


def _create(path: Path) -> TextIO:
    """A new file that only its owner may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii")


def _pretty(values: Mapping[str, object]) -> str:
    return json.dumps(values, indent=2) + "\n"
