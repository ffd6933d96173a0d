"""Measured steps as JSON lines: what a server writes while it runs, and what a cost is fitted to.

One object a line, for example `{"rows": 4, "tokens": 4, "prefill": 0, "kv": 812, "attended": 812, "padded_tokens": 4,
"padded_rows": 4, "seconds": 0.0123, "idle": false}`: the fields of `StepSample` and its shape, in short. A server adds
`end_ms`, when the step ended, for whoever lines steps up with requests; it is read over here.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from scheduler.errors import ConfigError
from scheduler.simulation.records import StepSample, StepShape

COUNTS = ("rows", "tokens", "prefill", "kv", "attended", "padded_tokens", "padded_rows")
KEYS = (*COUNTS, "seconds", "idle")
END = "end_ms"


def sample_line(sample: StepSample, end_ms: float | None = None) -> str:
    """A sample as one line of JSON, without the line's end; with `end_ms` if that is given."""
    shape, padded_tokens, padded_rows, seconds, idle = sample
    values: dict[str, float] = dict(zip(KEYS, (*shape, padded_tokens, padded_rows, seconds, idle), strict=True))
    if end_ms is not None:
        values[END] = end_ms
    return json.dumps(values)


def parse_sample(line: str) -> StepSample:
    """The inverse of `sample_line`. Raises ConfigError that names the key, not the line."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object")
    missing, unknown = [key for key in KEYS if key not in value], sorted(value.keys() - {*KEYS, END})
    if missing or unknown:
        raise ConfigError("; ".join((*(f"{key} is missing" for key in missing), *(f"{k} is unknown" for k in unknown))))
    counts = [_count(key, value[key]) for key in COUNTS]
    seconds, idle = value["seconds"], value["idle"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"seconds is {seconds!r}; it must be a finite number greater than 0")
    if not isinstance(idle, bool):
        raise ConfigError(f"idle is {idle!r}; it must be true or false")
    sample = StepSample(StepShape(*counts[:5]), counts[5], counts[6], float(seconds), idle)
    _check_sizes(sample)
    return sample


def write_samples(path: str | Path, samples: Iterable[StepSample]) -> int:
    """Write a file of samples; returns how many. Blocks; replaces a file that is there; raises OSError."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(sample_line(sample) + "\n")
            count += 1
    return count


def read_samples(path: str | Path) -> Iterator[StepSample]:
    """The samples of a file, read as they are asked for; empty lines are passed over.

    Raises ConfigError that names the file and the line, also if the file cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _sample_at(path, number, line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _sample_at(path: str | Path, number: int, line: str) -> StepSample:
    try:
        return parse_sample(line)
    except ConfigError as error:
        raise ConfigError(f"{path}:{number}: {error}") from None


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key} is {value!r}; it must be an integer of 0 or more")
    return value


def _check_sizes(sample: StepSample) -> None:
    """What every step satisfies: a row has a token, a program holds its step."""
    shape = sample.shape
    for low_name, low, high_name, high in (
        ("1", 1, "rows", shape.num_rows),
        ("rows", shape.num_rows, "tokens", shape.num_tokens),
        ("prefill", shape.num_prefill_tokens, "tokens", shape.num_tokens),
        ("rows", shape.num_rows, "padded_rows", sample.padded_rows),
        ("tokens", shape.num_tokens, "padded_tokens", sample.padded_tokens),
    ):
        if high < low:
            raise ConfigError(f"{high_name} is {high}, less than {low if low_name == '1' else f'{low_name}, {low}'}")
