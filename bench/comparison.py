"""Several servers under the same load, in turn, and the ratios between them. Called by `bench/serve.py`.

Figures of one machine drift with its temperature and its neighbours. So the servers alternate, round by round, each
round starting with another of them, and ratios are taken within a round.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.roofline import MachineLimits, ModelSize, least_seconds
from bench.summary import Spread, Summary

Kind = Literal["concurrency", "rate"]


@dataclass(frozen=True, slots=True)
class Level:
    """How hard a server is driven: a number of clients, or requests a second."""

    kind: Kind
    value: float

    def __str__(self) -> str:
        """As a heading."""
        if self.kind == "rate":
            return f"{self.value:g} requests/s"
        return "1 client" if self.value == 1 else f"{self.value:g} clients"


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One level. `rounds` maps a server's name to its summaries, round by round."""

    level: Level
    rounds: Mapping[str, Sequence[Summary]]


@dataclass(frozen=True, slots=True)
class Ratios:
    """The first server over another, within rounds; None where there is nothing to compare."""

    name: str
    other: str
    output_tok_s: Spread | None
    ttft_p50: Spread | None
    tpot_p50: Spread | None


RunOnce = Callable[[str, Level], Awaitable[Summary]]


async def run_level(names: Sequence[str], level: Level, num_rounds: int, run_once: RunOnce) -> LevelResult:
    """Drive every server at one level, `num_rounds` times, in turn."""
    rounds: dict[str, list[Summary]] = {name: [] for name in names}
    for index in range(num_rounds):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            rounds[name].append(await run_once(name, level))
    return LevelResult(level, rounds)


def ratios(result: LevelResult) -> list[Ratios]:
    """The first server over each of the others."""
    name, *others = result.rounds
    return [
        Ratios(
            name,
            other,
            _spread(result, name, other, lambda summary: summary.output_tok_s),
            _spread(result, name, other, lambda summary: summary.ttft.p50 if summary.ttft else None),
            _spread(result, name, other, lambda summary: summary.tpot.p50 if summary.tpot else None),
        )
        for other in others
    ]


def roofline_share(summary: Summary, level: Level, machine: MachineLimits, model: ModelSize) -> float | None:
    """The least time for this load over the time that it took; None for an open loop, whose length the rate sets."""
    if level.kind != "concurrency" or not summary.output_tokens:
        return None
    computed = summary.prompt_tokens - summary.cached_tokens
    return least_seconds(machine, model, computed, summary.output_tokens, level.value) / summary.wall_secs


def _spread(result: LevelResult, name: str, other: str, quantity: Callable[[Summary], float | None]) -> Spread | None:
    values = []
    for ours, theirs in zip(result.rounds[name], result.rounds[other], strict=True):
        above, below = quantity(ours), quantity(theirs)
        if above is not None and below:
            values.append(above / below)
    return Spread.of(values)
