"""What tests of the command line share: running it in process, options of quick runs, a recording to read."""

import json
from pathlib import Path

import pytest

from scheduler.cli import main
from scheduler.costs.samples import write_samples
from scheduler.simulation.records import StepSample, StepShape

ROOT = Path(__file__).parents[2]
FAST = ["--cost", "constant:0.02,0.0001", "--requests", "30", "--max-num-seqs", "8"]
FAST += ["--workload-option", "input_lengths=uniform:16-64", "--workload-option", "output_lengths=uniform:2-12"]


class Cli:
    """Runs commands in process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def __call__(self, *arguments: object) -> str:
        """Standard output of a command that must succeed and say nothing else."""
        code, out, err = self.attempt(*arguments)
        assert (code, err) == (0, "")
        return out

    def attempt(self, *arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *self._capsys.readouterr())


def samples(count: int = 400) -> list[StepSample]:
    """A machine with a line for its time, and programs of two sizes."""
    made = []
    for index in range(count):
        rows = 1 + index % 8
        shape = StepShape(rows, rows, 0, rows * (50 + index % 90), rows * (50 + index % 90))
        made.append(
            StepSample(shape, 4 if rows <= 4 else 8, 4 if rows <= 4 else 8, 0.01 + 0.001 * rows, index % 50 == 0)
        )
    return made


def record(folder: Path, count: int = 12, **section: object) -> Path:
    """A recording as docs/recording.md says, of requests that came a tenth of a second apart; the last was aborted."""
    folder.mkdir()
    lines = []
    for index in range(count):
        is_last = index == count - 1
        lines.append(
            {
                "timestamp": 100.0 * index,
                "input_length": 40,
                "output_length": 0 if is_last else 5,
                "hash_ids": [3 * index, 3 * index + 1, 3 * index + 2],
                "block_size": 16,
                "priority": 0.5,
                "max_new_tokens": 5,
                "ttft_ms": None if is_last else 25.0,
                "e2e_ms": 65.0,
                "queue_ms": None if is_last else 1.0,
                "cached_tokens": 0,
                "finish_reason": "abort" if is_last else "length",
                "num_preemptions": 0,
            }
        )
    # A request is written when it ends.
    (folder / "arrivals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    write_samples(folder / "steps.jsonl", samples())
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_queue_size": 100,
        "waiting_queue_policy": "priority",
        "policy_options": {},
        "capacity_policy": "known_tokens",
        "preempt_running": True,
        "aging_per_second": 0.01,
    }
    about = {
        "format": 1,
        "max_model_len": 2048,
        "page_size": 16,
        "num_pages": 500,
        "enable_prefix_reuse": True,
        "scheduler_config": settings | section,
        "end": None,
    }
    (folder / "about.json").write_text(json.dumps(about))
    return folder
