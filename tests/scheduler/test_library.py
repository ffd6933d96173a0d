"""The scheduler as a library: the standard library alone, no clock, no threads, and quick enough for every step."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler import RowResult, StepResult
from tests.scheduler.driver import make_request, make_scheduler

PACKAGE = Path(__file__).parents[2] / "scheduler"
ALLOWED = {
    "array",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "itertools",
    "math",
}
ALLOWED |= {"typing"}

BLOCKED_IMPORT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "numpy", "pydantic", "asyncio", "threading", "random"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from scheduler import PagePool, Request, Scheduler, SchedulerConfig
scheduler = Scheduler(SchedulerConfig())
scheduler.add_request(Request("a", (1, 2), 1), 0.0)
print(scheduler.plan(0.0).num_tokens)
"""


def test_it_works_where_nothing_else_is_installed():
    done = subprocess.run(
        [sys.executable, "-S", "-c", BLOCKED_IMPORT], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("2", "")


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_it_imports_nothing_that_acts(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    assert {name for name in names if not name.startswith("scheduler")} <= ALLOWED


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_queue_costs_nothing_per_step(policy):
    """The best of many steps, with a queue of 10 000 and without; generous, for machines that are busy."""

    def best(num_waiting: int) -> float:
        scheduler = make_scheduler(
            max_num_seqs=32, num_pages=3000, max_queue_size=20_000, waiting_queue_policy=policy, max_model_len=2048
        )
        scheduler.add_requests([make_request(f"r{index}", 2, 300) for index in range(32 + num_waiting)], 0.0)
        times = []
        for step in range(60):
            started = time.perf_counter()
            plan = scheduler.plan(step * 0.01)
            planned = time.perf_counter()
            result = StepResult(plan.step_id, tuple(RowResult(7 if row.samples else None) for row in plan.rows))
            resumed = time.perf_counter()
            scheduler.commit(plan, result, step * 0.01)
            times.append(time.perf_counter() - resumed + planned - started)
        return min(times[10:])

    assert best(10_000) < 3 * best(0) + 0.0005
