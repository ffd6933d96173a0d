"""What the scheduler may be told. Built by `model/engine.py` from the server's YAML, or by hand in a simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. Frozen: change it by building another.

    Attributes:
        max_num_seqs: slots, the requests that may run at once (rows of the largest step).
        max_num_batched_tokens: the token budget of one step, prefill chunks and decode tokens together.
        max_model_len: tokens of prompt and output together that one request may hold.
        max_queue_size: waiting requests beyond which `add_requests` raises `QueueFullError`.
        waiting_queue_policy: the policy's name: a bundled one (see `scheduler/policies/`) or a registered one.
        policy_options: the policy's own options, by name.
        capacity_policy: `known_tokens` (the pool used to the full, requests put back when it overflows) or
            `reserve_to_completion` (a request starts only if all it may ever need is free).
        preempt_running: under `priority` and `mlfq`, whether a waiting request may evict a running one.
        aging_per_second: under `priority`, what a waiting request gains in effective priority per second.
        num_pages: usable KV pages, the sink (page 0) aside.
        page_size: tokens per page.
        enable_prefix_reuse: whether full pages are kept and shared by content.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    max_queue_size: int = 4096
    waiting_queue_policy: str = "fcfs"
    policy_options: Mapping[str, object] = field(default_factory=dict)
    capacity_policy: str = "known_tokens"
    preempt_running: bool = True
    aging_per_second: float = 0.01
    num_pages: int = 4096
    page_size: int = 16
    enable_prefix_reuse: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_queue_size < 0:
            raise ConfigError(f"max_queue_size must not be negative, not {self.max_queue_size}")
        if not 0 <= self.aging_per_second < float("inf"):
            raise ConfigError(f"aging_per_second must be finite and not negative, not {self.aging_per_second}")
