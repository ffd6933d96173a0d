"""What a policy is tried on: scripts of arrivals, aborts and steps, and streams that go on. Plain data that prints.

`hypothesis` draws them (`script_strategy`, `stream_strategy`), `Player` plays them, failures print them.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scheduler.config import SchedulerConfig
from scheduler.request import Request

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

LONGEST = 40
"""Positions that no request of a script goes beyond; every pool holds one such request."""

LOAD = 0.99
"""Of what the slots can serve, how much a stream asks for: with less, queues empty and hide who starves."""

SECONDS_PER_STREAM_STEP = 2.0

_SHARED_PREFIX = tuple(range(100, 116))


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request comes. Its prompt is the first `shared` tokens of a common text and `own` tokens like no other's.

    It may draw `max_new_tokens`, and ends early when it draws one of the first `num_stop_tokens` of 64 tokens.
    """

    shared: int = 0
    own: int = 1
    max_new_tokens: int = 1
    num_stop_tokens: int = 0
    priority: float = 0.5
    tenant: str | None = None
    predicted: float | None = None

    def request(self, index: int) -> Request:
        """The request that came as number `index`; its id is `r0`, `r1` …"""
        first = 1000 * (index + 1)
        return Request(
            request_id=f"r{index}",
            prompt_token_ids=_SHARED_PREFIX[: self.shared] + tuple(range(first, first + self.own)),
            max_new_tokens=self.max_new_tokens,
            priority=self.priority,
            stop_token_ids=frozenset(range(self.num_stop_tokens)),
            sampling=index,
            tenant=self.tenant,
            predicted_new_tokens=self.predicted,
        )

    def describe(self) -> str:
        """The request in words."""
        words = f"{self.shared} shared and {self.own} own prompt tokens, {self.max_new_tokens} new at most"
        if self.num_stop_tokens:
            words += f", {self.num_stop_tokens} of 64 tokens stop it"
        words += f", priority {self.priority}"
        if self.tenant is not None:
            words += f", tenant {self.tenant!r}"
        return words if self.predicted is None else f"{words}, {self.predicted:g} predicted"


@dataclass(frozen=True, slots=True)
class Abort:
    """The request that came as number `index` is aborted, if it is live."""

    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """So many steps are planned and run."""

    count: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes without a step."""

    seconds: float


Operation = Arrive | Abort | Step | Wait


@dataclass(frozen=True, slots=True)
class Script:
    """A finite story, and the engine that it happens on.

    Attributes:
        num_spare_pages: pages of the pool beyond those that one request of `LONGEST` positions takes.
        pipelined: a step is planned while the one before it runs.
    """

    operations: tuple[Operation, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    num_spare_pages: int
    page_size: int
    enable_prefix_reuse: bool
    pipelined: bool
    seconds_per_step: float

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """The policy's configuration with the limits of this script."""
        return replace(
            config,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=2 * LONGEST,
            max_queue_size=10**6,
            num_pages=-(-LONGEST // self.page_size) + self.num_spare_pages,
            page_size=self.page_size,
            enable_prefix_reuse=self.enable_prefix_reuse,
        )

    def describe(self) -> str:
        """The script in words, a line an operation."""
        pages = -(-LONGEST // self.page_size) + self.num_spare_pages
        lines = [
            f"{self.max_num_seqs} slots, {self.max_num_batched_tokens} tokens a step, {pages} pages of "
            f"{self.page_size}, prefix reuse {'on' if self.enable_prefix_reuse else 'off'}, "
            f"{'pipelined' if self.pipelined else 'not pipelined'}, {self.seconds_per_step:g} s a step"
        ]
        index = 0
        for operation in self.operations:
            match operation:
                case Arrive():
                    lines.append(f"r{index} comes: {operation.describe()}")
                    index += 1
                case Abort():
                    lines.append(f"r{operation.index} is aborted")
                case Step():
                    lines.append(f"{operation.count} steps")
                case Wait():
                    lines.append(f"{operation.seconds:g} s pass")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Stream:
    """A burst of requests, and then requests of some `kinds`, in turn, at `LOAD` of what the slots can serve.

    Nothing but slots is short: a request takes one for as many steps as it draws tokens.
    """

    burst: tuple[Arrive, ...]
    kinds: tuple[Arrive, ...]
    max_num_seqs: int

    @property
    def longest_wait(self) -> int:
        """Steps that nobody should wait longer than: 100 (200 s), and six times what the burst alone takes."""
        return 100 + 6 * -(-sum(kind.max_new_tokens for kind in self.burst) // self.max_num_seqs)

    def script(self) -> Script:
        """The engine that it happens on, with the burst, and steps without and with arrivals until all is judged."""
        operations: list[Operation] = list(self.burst)
        credit, index = 0.0, 0
        for _ in range(self.longest_wait + 20):
            credit += LOAD * self.max_num_seqs
            while credit >= (kind := self.kinds[index % len(self.kinds)]).max_new_tokens:
                credit -= kind.max_new_tokens
                index += 1
                operations.append(kind)
            operations.append(Step(1))
        return Script(tuple(operations), self.max_num_seqs, 1024, 1000, 4, True, False, SECONDS_PER_STREAM_STEP)

    def describe(self) -> str:
        """The stream in words."""
        lines = [f"{self.max_num_seqs} slots, pages in plenty, {SECONDS_PER_STREAM_STEP:g} s a step"]
        lines += [f"r{index} comes: {kind.describe()}" for index, kind in enumerate(self.burst)]
        lines.append(f"then for ever, in turn, at {LOAD:.0%} of what the slots can serve:")
        lines += [f"one comes: {kind.describe()}" for kind in self.kinds]
        return "\n".join(lines)


def script_strategy(aborts: bool = True) -> "SearchStrategy[Script]":
    """Draws scripts."""
    from hypothesis import strategies as st

    operations: list[SearchStrategy[Operation]] = [_arrivals(), _arrivals(), st.builds(Step, st.integers(1, 4))]
    operations.append(st.builds(Wait, st.sampled_from([0.5, 30.0])))
    if aborts:
        operations.append(st.builds(Abort, st.integers(0, 9)))
    one = st.one_of(operations)
    # Lists have five members on average unless more are demanded: too few for requests to be in each other's way.
    lists = st.one_of(st.lists(one, min_size=1, max_size=30), st.lists(one, min_size=12, max_size=30))
    return st.builds(
        Script,
        operations=lists.map(tuple),
        max_num_seqs=st.sampled_from([1, 2, 5, 8]),
        max_num_batched_tokens=st.sampled_from([64, 7, 2, 1]),
        num_spare_pages=st.sampled_from([0, 1, 3, 40]),
        page_size=st.sampled_from([4, 2, 1]),
        enable_prefix_reuse=st.booleans(),
        pipelined=st.booleans(),
        seconds_per_step=st.sampled_from([0.1, 0.01, 1.0]),
    )


def stream_strategy() -> "SearchStrategy[Stream]":
    """Draws streams, in which requests draw at least one token and none stops early."""
    from hypothesis import strategies as st

    kinds = _arrivals(least_new_tokens=1, most_new_tokens=6, stops=False)
    return st.builds(
        Stream,
        burst=st.lists(kinds, min_size=1, max_size=4).map(tuple),
        kinds=st.lists(kinds, min_size=1, max_size=2).map(tuple),
        max_num_seqs=st.integers(1, 3),
    )


def _arrivals(least_new_tokens: int = 0, most_new_tokens: int = 16, stops: bool = True) -> "SearchStrategy[Arrive]":
    from hypothesis import strategies as st

    return st.builds(
        Arrive,
        shared=st.integers(0, len(_SHARED_PREFIX)),
        own=st.integers(1, LONGEST - len(_SHARED_PREFIX) - 16),
        max_new_tokens=st.integers(least_new_tokens, most_new_tokens),
        num_stop_tokens=st.sampled_from([0, 2, 8] if stops else [0]),
        priority=st.sampled_from([0.5, 0.0, 1.0, 0.25]),
        tenant=st.sampled_from([None, "a", "b"]),
        predicted=st.sampled_from([None, 1.0, 4.0, 30.0]),
    )
