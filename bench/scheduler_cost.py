"""What the scheduler itself costs a step: plan + commit in milliseconds, by running and waiting requests.

`python -m bench.scheduler_cost` prints one line for each size. No device and no server: the results of a step are made
up here, which is not timed. The median is that of a step in which every running request decodes; the 99th percentile
that of one in which many end and as many start.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from scheduler import Request, RowResult, Scheduler, SchedulerConfig, StepPlan, StepResult


def measure(num_running: int, num_waiting: int, policy: str, num_steps: int) -> tuple[float, float, float]:
    """(median plan, median plan + commit, 99th percentile of plan + commit), each in seconds."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=max(512, 2 * num_running),
            max_queue_size=num_waiting + num_running,
            num_pages=num_running * 40,
            waiting_queue_policy=policy,
        )
    )
    scheduler.add_requests(list(_requests(num_running + num_waiting)), 0.0)
    plans, totals = [], []
    for step in range(num_steps + 40):
        now = step * 0.03
        started = time.perf_counter()
        plan = scheduler.plan(now)
        planned = time.perf_counter()
        result = _result(plan)
        committing = time.perf_counter()
        events = scheduler.commit(plan, result, now)
        done = time.perf_counter()
        finished = sum(event.finish_reason is not None for event in events)
        scheduler.add_requests(list(_requests(finished, f"s{step}-")), now)
        if step >= 40:
            plans.append(planned - started)
            totals.append(planned - started + done - committing)
    return statistics.median(plans), statistics.median(totals), statistics.quantiles(totals, n=100)[98]


def _requests(count: int, prefix: str = "r") -> Iterator[Request]:
    for index in range(count):
        yield Request(
            f"{prefix}{index}",
            tuple(range(index, index + 64)),
            64 + index % 64,
            priority=index % 3 / 2,
            tenant=f"t{index % 8}",
        )


def _result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, tuple(RowResult(7 if row.samples else None) for row in plan.rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler_cost", description=__doc__)
    parser.add_argument("--running", default="32,256", help="running requests (%(default)s)")
    parser.add_argument("--waiting", default="0,1000,10000,100000", help="waiting requests (%(default)s)")
    parser.add_argument("--policies", default="fcfs,priority", help="policies (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps measured (%(default)s)")
    options = parser.parse_args(arguments)
    table = Table(title="the scheduler's own milliseconds a step")
    for column in ("policy", "running", "waiting", "plan p50", "plan + commit p50", "p99"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in options.policies.split(","):
        for running in map(int, options.running.split(",")):
            for waiting in map(int, options.waiting.split(",")):
                times = measure(running, waiting, policy, options.steps)
                table.add_row(policy, str(running), str(waiting), *(f"{1000 * seconds:.3f}" for seconds in times))
    Console().print(table)


if __name__ == "__main__":
    main()
