"""What passes between the scheduler and the runner: a frozen plan of one step, its result, and the events of both.

`Scheduler.plan` builds a `StepPlan`, `model/runner.py` turns it into a `StepResult`, `Scheduler.commit` turns both into
`Event`s. Nothing here can be changed once built. What there is one of per row and step is a `NamedTuple`: a frozen
dataclass takes four times as long to build.
"""

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.request import FinishReason


class PlannedRow(NamedTuple):
    """One request's share of one step.

    Attributes:
        request_id, attempt: whose row it is; a result whose attempt is no longer the request's is stale.
        slot: the request's row of device state, in [0, max_num_seqs).
        starts: the first row of this attempt: the runner must (re)build the slot's device state from `token_history`.
        token_start: absolute position of the first token of this row.
        token_ids: the ids to compute. Where `feeds_sampled` is set this is `(0,)`, to be ignored: the one token is
            what the step before sampled for this slot, and only the device knows it yet.
        feeds_sampled: see `token_ids`.
        page_ids: pages that cover positions [0, token_start + len(token_ids)).
        samples: whether the row reaches the end of the known tokens, so that the next token is drawn after it.
        num_prompt_tokens: length of the request's prompt.
        num_output_tokens: outputs known or pending when the row runs (the index of the token it draws).
        prompt_token_ids, output_token_ids: given on a row that `starts`, else empty. They rebuild penalties' state.
        next_token_ids: ids known to follow each of `token_ids` within the prompt (for prompt logprobs): positions
            token_start+1 … ; one shorter than `token_ids` when the row ends at the prompt's end.
        sampling: the request's opaque sampling rules.
    """

    request_id: str
    attempt: int
    slot: int
    starts: bool
    token_start: int
    token_ids: tuple[int, ...]
    feeds_sampled: bool
    page_ids: tuple[int, ...]
    samples: bool
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]
    sampling: object

    @property
    def num_tokens(self) -> int:
        """Tokens that this row computes."""
        return len(self.token_ids)

    @property
    def kv_length(self) -> int:
        """Positions that the row's attention reads: everything up to and including its last token."""
        return self.token_start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, decided. Rows of a single token that sample (decode) come first, prefill chunks after.

    Attributes:
        step_id: rises by one with every plan that has rows; plans are committed in this order.
        rows: at most `max_num_seqs`, a request at most once. Empty: there is nothing to run.
        preempted: ids put back to waiting while planning, in order.
    """

    step_id: int
    rows: tuple[PlannedRow, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)


class RowResult(NamedTuple):
    """What the device says of one row, in the order of `StepPlan.rows`.

    Attributes:
        token_id: the token drawn; None if the row did not sample.
        logprobs: opaque, handed on with the token.
        prompt_logprobs: opaque, handed on (one entry per position of the row, when the request asked for them).
        error: set when this row alone failed (its logits were not finite); the request ends with `ERROR`.
    """

    token_id: int | None
    logprobs: object = None
    prompt_logprobs: object = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan's rows, same order and length."""

    step_id: int
    rows: tuple[RowResult, ...]


class Event(NamedTuple):
    """What happened to one request in a commit or an abort.

    A request that ends gets exactly one event with `finish_reason`; it may carry the last token too.

    Attributes:
        request_id: whose event.
        token_id: a new output token, or None.
        logprobs, prompt_logprobs: as the runner gave them.
        finish_reason: set on the request's last event.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: what went wrong, when `finish_reason` is `ERROR`.
    """

    request_id: str
    token_id: int | None = None
    logprobs: object = None
    prompt_logprobs: object = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics. Counters only rise.

    `pages_in_use` counts pages that live requests hold (quarantined ones too), not evictable cached ones.
    """

    num_running: int
    num_waiting: int
    pages_in_use: int
    num_pages: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
