"""The cost that was learnt from a real run: what a padded program takes, plus what its contents add.

`learning.py` makes a `FittedCost`, `stored.py` saves and loads it, the simulator asks it for seconds. A simulated step
has no padding, so the model picks the program for it as the engine does (`model/buckets.py`, `StepLayout.holds`).
"""

import math
from dataclasses import dataclass, field

from scheduler.costs.checks import above_zero, at_least_zero
from scheduler.errors import ConfigError
from scheduler.simulation.records import StepShape


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled step of fixed sizes. Raises ConfigError for sizes or seconds that cannot be.

    Attributes:
        num_tokens, num_rows: what it is padded to.
        single_token_rows: whether it serves only steps whose rows have one token each (then it has as many of both).
        extra_seconds: what it takes longer (or less, if negative) than the line through all programs says.
        num_samples: steps behind `extra_seconds`; 0 if the program was seen too seldom to have its own.
    """

    num_tokens: int
    num_rows: int
    single_token_rows: bool
    extra_seconds: float = 0.0
    num_samples: int = 0

    def __post_init__(self) -> None:
        name = f"program of {self.num_tokens} tokens and {self.num_rows} rows"
        if not 1 <= self.num_rows <= self.num_tokens or self.num_samples < 0:
            raise ConfigError(f"{name}, seen {self.num_samples} times: it cannot be")
        if self.single_token_rows and self.num_tokens != self.num_rows:
            raise ConfigError(f"{name}: one of single-token rows has as many of both")
        if not math.isfinite(self.extra_seconds):
            raise ConfigError(f"{name}: extra_seconds is {self.extra_seconds}; it must be finite")

    def holds(self, num_tokens: int, num_rows: int) -> bool:
        """Whether a step fits. A program of mixed rows serves one-token rows too."""
        fits = num_tokens <= self.num_tokens and num_rows <= self.num_rows
        return fits and (not self.single_token_rows or num_tokens == num_rows)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorts programs as the engine tries them: one-token rows first, then by tokens, then by rows."""
        return (not self.single_token_rows, self.num_tokens, self.num_rows)


@dataclass(frozen=True, slots=True)
class SecondsPer:
    """Seconds that each of these adds to a step, none below 0. Raises ConfigError otherwise."""

    step: float = 0.0
    padded_token: float = 0.0
    padded_row: float = 0.0
    kv_token: float = 0.0
    attended: float = 0.0
    row: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step", "padded_token", "padded_row", "kv_token", "attended", "row"):
            at_least_zero(f"seconds per {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A line through all programs, a correction for each, and common costs of KV, attention and rows. A `CostModel`.

    seconds = step + padded_token · T + padded_row · R + (the program's extra) + kv_token · `num_kv_tokens`
    + attended · `num_attended` + row · `num_rows`, and never less than `least_seconds`.

    Raises ConfigError if numbers cannot be or a program is listed twice.

    Attributes:
        seconds_per: the coefficients. programs: those known, in the order in which the engine tries them; empty if
            nothing is padded (then T and R are the step's own).
        idle_seconds: what a step takes longer after the device was idle.
        least_seconds: greater than 0.
    """

    seconds_per: SecondsPer
    programs: tuple[Program, ...] = ()
    idle_seconds: float = 0.0
    least_seconds: float = 1e-6
    _kv_and_attended: tuple[float, float] = field(init=False, repr=False, compare=False)
    # What contents do not change, by (tokens, rows). Filled as shapes are asked for; never read by anyone else.
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least_zero("idle_seconds", self.idle_seconds)
        above_zero("least_seconds", self.least_seconds)
        programs = tuple(sorted(self.programs, key=lambda program: program.order))
        if len({program.order for program in programs}) < len(programs):
            raise ConfigError("a program is listed twice")
        object.__setattr__(self, "programs", programs)
        object.__setattr__(self, "_kv_and_attended", (self.seconds_per.kv_token, self.seconds_per.attended))

    def step_seconds(self, shape: StepShape) -> float:
        """Seconds of a step of this shape, in the program that the engine would run it with."""
        num_rows, num_tokens, _, num_kv_tokens, num_attended = shape
        base = self._known.get((num_tokens, num_rows))
        if base is None:
            base = self._known[num_tokens, num_rows] = self._base_seconds(num_tokens, num_rows)
        per_kv_token, per_attended = self._kv_and_attended
        seconds = base + per_kv_token * num_kv_tokens + per_attended * num_attended
        return seconds if seconds > self.least_seconds else self.least_seconds

    def idle_start_seconds(self) -> float:
        """What a step takes longer after the device was idle."""
        return self.idle_seconds

    def program_of(self, num_tokens: int, num_rows: int) -> Program | None:
        """The first known program that holds a step, or None."""
        return next((program for program in self.programs if program.holds(num_tokens, num_rows)), None)

    def program_seconds(self, program: Program) -> float:
        """What a program takes before its contents add to it."""
        return self._line(program.num_tokens, program.num_rows) + program.extra_seconds

    def _base_seconds(self, num_tokens: int, num_rows: int) -> float:
        """All but KV and attention."""
        contents = self.seconds_per.row * num_rows
        program = self.program_of(num_tokens, num_rows)
        if program is not None:
            return self.program_seconds(program) + contents
        nearest = self._nearest(num_tokens, num_rows)
        extra = nearest.extra_seconds if nearest is not None else 0.0
        tokens = max(num_tokens, nearest.num_tokens) if nearest is not None else num_tokens
        rows = max(num_rows, nearest.num_rows) if nearest is not None else num_rows
        return self._line(tokens, rows) + extra + contents

    def _nearest(self, num_tokens: int, num_rows: int) -> Program | None:
        """The program to extrapolate from if none holds the step: of its kind, and least exceeded."""
        single = num_tokens == num_rows
        kind = [program for program in self.programs if program.single_token_rows == single]
        if single and not kind:
            kind = list(self.programs)

        def excess(program: Program) -> tuple[int, int, tuple[bool, int, int]]:
            return max(0, num_tokens - program.num_tokens), max(0, num_rows - program.num_rows), program.order

        return min(kind, key=excess, default=None)

    def _line(self, num_tokens: int, num_rows: int) -> float:
        per = self.seconds_per
        return per.step + per.padded_token * num_tokens + per.padded_row * num_rows
