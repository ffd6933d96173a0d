"""One request as the scheduler sees it: token ids, limits, priority and progress. No text, no sampling rules.

Built by `api/` (or a simulation), changed only by `Scheduler`. Everyone else reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from math import inf


class RequestStatus(IntEnum):
    """Where a request stands. Ordered, so that `status >= FINISHED` asks whether it has ended."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


class FinishReason(StrEnum):
    """Why a request ended, under the names that `request_success_total` uses."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def priority_class(priority: float) -> str:
    """`low`, `default` or `high`: below, at and above 0.5."""
    return "default" if priority == 0.5 else "high" if priority > 0.5 else "low"


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Compared and hashed by identity.

    The first block is the caller's and never changes. The second is the scheduler's: nobody else may write it.

    Attributes:
        request_id: unique among the live requests of one scheduler.
        prompt_token_ids: at least one id.
        max_new_tokens: tokens to generate at most; 0 computes the prompt and ends (scoring, `echo`).
        arrival_time: seconds on the clock that is passed to `plan`.
        priority: in [0, 1], higher is served first.
        stop_token_ids: ids that end the request once `min_new_tokens` are out; the id itself counts as output.
        min_new_tokens: output tokens before which no stop token ends the request.
        cache_salt: prefix pages are shared only between requests of equal salt.
        read_prefix_cache: False when every prompt position must really be computed (prompt logprobs).
        sampling: opaque to the scheduler, carried to the runner.
        tenant: who pays; None for nobody in particular. Policies that share among tenants read it.
        predicted_new_tokens: output tokens that somebody predicts, or None. Policies that order by length read it.
        num_transferred_tokens: known tokens whose KV another worker has computed and hands over when the request first
            starts; after a preemption they are computed here.

        status, output_token_ids: progress so far. Outputs are appended by `commit` only.
        num_computed_tokens: positions whose KV is computed or planned in a step that is in flight.
        num_pending_tokens: sampled by steps in flight, not yet known to the host (at most one a step).
        num_cached_tokens: prompt tokens found in the prefix cache when the request first started.
        page_ids: pages in order of position. slot: its row of device state while running, else None.
        attempt: raised at each preemption and at the end, so that results of an earlier attempt are recognisably stale.
        num_preemptions: how often it was put back. num_lost_tokens: positions computed in vain because of that, less
            those found in the prefix cache when it started again.
        sequence: order of being added; breaks ties. admitted_at: when it last started to run; first_started_at: when
            it first did, or None.
        queued_at: when it was added, moved forward by all the time that it ran, so that `now - queued_at` of a waiting
            request is the time that it has waited. admitted_key: the queue's key for it when it last started.
        running_key: its place among the running, fixed when it last started.
        page_digests: chain digests of its full pages, as far as they were needed. num_registered_pages: how many of
            them are known to the prefix index; next_registration: known tokens at which the next one is full, infinite
            if none is to be indexed. last_step: id of the last step that it was planned in.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    arrival_time: float = 0.0
    priority: float = 0.5
    stop_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    cache_salt: str | None = None
    read_prefix_cache: bool = True
    sampling: object = None
    tenant: str | None = None
    predicted_new_tokens: float | None = None
    num_transferred_tokens: int = 0

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_pending_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    page_ids: list[int] = field(default_factory=list, init=False)
    slot: int | None = field(default=None, init=False)
    attempt: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_lost_tokens: int = field(default=0, init=False)
    sequence: int = field(default=0, init=False)
    admitted_at: float = field(default=0.0, init=False)
    first_started_at: float | None = field(default=None, init=False)
    queued_at: float = field(default=0.0, init=False)
    admitted_key: float = field(default=0.0, init=False)
    running_key: float = field(default=0.0, init=False)
    page_digests: list[bytes] = field(default_factory=list, init=False)
    num_registered_pages: int = field(default=0, init=False)
    next_registration: float = field(default=inf, init=False)
    last_step: int = field(default=0, init=False)
    page_ids_snapshot: tuple[int, ...] = field(default=(), init=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and outputs that the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, known or pending, that no step has been given yet."""
        return self.num_known_tokens + self.num_pending_tokens - self.num_computed_tokens

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known token ids of positions [start, stop), prompt and outputs alike."""
        prompt = self.prompt_token_ids
        length = len(prompt)
        if stop <= length:
            return tuple(prompt[start:stop])
        outputs = self.output_token_ids[max(0, start - length) : stop - length]
        return (*prompt[start:length], *outputs) if start < length else tuple(outputs)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status >= RequestStatus.FINISHED
