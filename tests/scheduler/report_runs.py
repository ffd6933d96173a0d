"""Hand-made runs for the tests of `scheduler/reports/`, small enough to compute every number by hand."""

from array import array
from collections.abc import Sequence

from scheduler.simulation.records import Arrival, Outcome, RunResult, StepShape, StepSpan


def outcome(
    request_id: str,
    time: float,
    tokens: Sequence[float] = (),
    *,
    reason: str = "stop",
    started: float | None = None,
    input_length: int = 10,
    output_length: int | None = None,
    priority: float = 0.5,
    tenant: str | None = None,
    replica: str = "r0",
) -> Outcome:
    """A request that arrives at `time`, ends with its last token, and is planned at `started` or on arrival."""
    planned = time if started is None and tokens else started
    wanted = max(len(tokens), 1) if output_length is None else output_length
    return Outcome(
        Arrival(request_id, time, input_length, wanted, priority=priority, tenant=tenant),
        replica=replica,
        queued_at=time,
        started_at=planned,
        first_token_at=tokens[0] if tokens else None,
        finished_at=tokens[-1] if tokens and reason else None,
        token_times=array("d", tokens),
        finish_reason=reason,
    )


def four_requests() -> RunResult:
    """Two that finish, one refused, one aborted; spans 0 s to 10 s.

    a: TTFT 1, ITLs 1 and 2. b: TTFT 2, one ITL of 4. c: refused. d: TTFT 0.5, no ITL, aborted at once.
    """
    a = outcome("a", 0.0, (1.0, 2.0, 4.0), started=0.5, tenant="x")
    b = outcome("b", 4.0, (6.0, 10.0), priority=0.9, tenant="y", input_length=20)
    b.num_cached_tokens, b.num_preemptions, b.num_wasted_tokens, b.transfer_seconds = 5, 1, 8, 0.25
    c = outcome("c", 5.0, reason="refused", tenant="y", priority=0.1)
    d = outcome("d", 6.0, (6.5,), reason="abort", tenant="x", output_length=4)
    labels = {"policy": "fcfs", "load": "2", "seed": "1"}
    return RunResult([a, b, c, d], 10.0, labels, num_steps=7, num_prefix_queries=50, num_prefix_hits=5)


def with_steps() -> RunResult:
    """As `four_requests`, with steps, of which the one at 7 s puts `b` back."""
    run = four_requests()
    decode, prefill = StepShape(2, 2, 0, 24, 24), StepShape(1, 10, 10, 10, 100)
    run.steps = [
        StepSpan("r0", 0.5, 1.0, prefill, ()),
        StepSpan("r0", 1.0, 2.0, decode, ()),
        StepSpan("r1", 1.5, 2.5, decode, ()),
        StepSpan("r0", 7.0, 10.0, decode, ("b",)),
    ]
    return run


def run_of(policy: str, load: str, seed: str, ttft: float, tenant: str | None = None) -> RunResult:
    """One request of 3 tokens that has this TTFT and ITLs of 1 s."""
    request = outcome("only", 0.0, (ttft, ttft + 1, ttft + 2), tenant=tenant)
    return RunResult([request], ttft + 2, {"policy": policy, "load": load, "seed": seed})
