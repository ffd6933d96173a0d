"""What passes between the parts of a simulation: arrivals, the shape and time of steps, outcomes.

`scheduler/workloads/` makes `Arrival`s, `scheduler/costs/` turns a `StepShape` into seconds, the simulator fills
`Outcome`s, and `scheduler/reports/` reads them. The server records the same things of real runs.
Times are seconds from the start of the run. Token counts are what a server would count.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    Attributes:
        request_id: unique within a run.
        time: when it arrives.
        input_length: tokens of the prompt, at least 1.
        output_length: tokens that it will really generate (its end of sequence included), at least 1. Policies do not
            see this number.
        hash_ids: what the prompt consists of, one id for each block of `block_size` tokens, the last partial or left
            out; two prompts share a prefix exactly as far as their ids agree from the start (Mooncake's `hash_ids`).
            Empty: a prompt like no other.
        block_size: tokens a hash id stands for.
        max_new_tokens: the bound that the client gave, at least `output_length`; None: `output_length` itself.
        priority: in [0, 1]. tenant: who pays, None for nobody in particular.
        session: names a conversation (for routers that keep one on a replica), or None.
    """

    request_id: str
    time: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    block_size: int = 512
    max_new_tokens: int | None = None
    priority: float = 0.5
    tenant: str | None = None
    session: str | None = None


class Workload(Protocol):
    """Where requests come from. Deterministic by its seed; one object serves one run."""

    def arrivals(self) -> Iterator[Arrival]:
        """Requests that come whatever the server does, in order of time; read lazily, once."""

    def followups(self, arrival: Arrival, now: float) -> tuple[Arrival, ...]:
        """Requests caused by the end of `arrival` at `now`, none of them before `now` (closed loops, conversations)."""


class StepShape(NamedTuple):
    """What the time of a step depends on.

    Attributes:
        num_rows: requests in the step. num_tokens: tokens of all rows.
        num_prefill_tokens: tokens of those rows that compute more than one token or do not end in a drawn token.
        num_kv_tokens: Σ over rows of the positions that the row's attention reads (its context, itself included).
        num_attended: Σ over rows of tokens × positions read: what attention's FLOPs are proportional to.
    """

    num_rows: int
    num_tokens: int
    num_prefill_tokens: int
    num_kv_tokens: int
    num_attended: int


class StepSample(NamedTuple):
    """A step of a real run: its shape, the padded program that ran it, and how long it took.

    Attributes:
        shape: the step's own numbers.
        padded_tokens, padded_rows: sizes of the compiled program; equal to the shape's where nothing is padded.
        seconds: from the end of the step before (or its own start, if the device was idle) to its end.
        started_after_idle: the device had nothing to do before it, so that `seconds` holds planning and dispatch too.
    """

    shape: StepShape
    padded_tokens: int
    padded_rows: int
    seconds: float
    started_after_idle: bool


class CostModel(Protocol):
    """How long a step takes. Pure: same shape, same seconds."""

    def step_seconds(self, shape: StepShape) -> float:
        """Seconds from one step's end to the next one's, while the device is kept busy; greater than 0."""

    def idle_start_seconds(self) -> float:
        """What a step takes longer when the device was idle before it (planning and dispatch are not hidden)."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Filled by the simulator while it runs; read by reports.

    Attributes:
        arrival: the request. replica: the name of the replica that generated its tokens.
        queued_at: when it reached a scheduler (after the router), equal to `arrival.time` unless something delayed it.
        started_at: when it was first planned, or None. first_token_at, finished_at: None if it never came to that.
        token_times: when each output token came out; [0] is `first_token_at`.
        finish_reason: `stop`, `length`, `abort`, `error`, or `refused` (the queue was full, or it never fits).
        num_cached_tokens: prompt tokens found in the prefix cache at the first start.
        num_preemptions: how often it was put back. num_wasted_tokens: positions computed and then lost to that.
        transfer_seconds: time between the context worker's end and the generation worker's having the pages; 0 unified.
    """

    arrival: Arrival
    replica: str = ""
    queued_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    finish_reason: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_wasted_tokens: int = 0
    transfer_seconds: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival.time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_at is None else self.finished_at - self.arrival.time

    def itls(self) -> list[float]:
        """Seconds between consecutive tokens, one fewer than tokens."""
        times = self.token_times
        return [later - earlier for earlier, later in pairwise(times)]


class StepSpan(NamedTuple):
    """One simulated step on a time line: `start` and `end` in seconds, ids put back while it was planned."""

    replica: str
    start: float
    end: float
    shape: StepShape
    preempted: tuple[str, ...]


@dataclass(slots=True)
class RunResult:
    """One simulated (or recorded) run.

    Attributes:
        outcomes: one per request, in order of arrival.
        duration: when the last event happened.
        labels: what the run was: policy, workload, load, seed, topology …, as text, in a fixed order.
        steps: the time line, if it was asked for (it is long).
        num_steps: steps of all replicas. num_prefix_queries, num_prefix_hits: tokens asked of and found in the caches.
    """

    outcomes: list[Outcome]
    duration: float
    labels: dict[str, str] = field(default_factory=dict)
    steps: list[StepSpan] = field(default_factory=list)
    num_steps: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
