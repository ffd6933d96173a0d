"""From the steps of a real run to a `FittedCost`. Used by `fit.py`, and by whoever needs no held-out error.

The fit is trimmed least squares of relative errors. Steps in which something compiled, or the machine was busy with
something else, would pull any mean; so they are left out, found by their distance from what the model says of their
program, in units of the median distance there. Rounds of fitting and trimming repeat until the same steps stay.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import sumprod
from operator import sub
from statistics import median

from scheduler.costs.fitted import FittedCost, Program, SecondsPer
from scheduler.costs.nonnegative import nonnegative_least_squares
from scheduler.errors import ConfigError
from scheduler.simulation.records import StepSample

MIN_STEPS = 20
# A program that ran this often gets an intercept of its own: of three, one may be an outlier.
MIN_PROGRAM_STEPS = 3
# The intercept of a program that ran n times goes n / (n + SHRINKAGE) of the way from the common line to its own mean.
SHRINKAGE = 1.0
# The first round does not know yet what contents cost, and must not mistake a long context for a hiccup.
FIRST_CUT = 10.0
# Wide, since moderately late steps are part of a run's time: with normal noise a nearer cut would do.
CUT = 6.0
MAX_ROUNDS = 8
# Times closer to each other than this share of a step are the same: a clock's and a scheduler's jitter.
LEAST_SPREAD = 0.005
# The median absolute deviation of a normal distribution times this is its standard deviation.
NORMAL = 1.4826

type Key = tuple[int, int, bool]


@dataclass(slots=True)
class _Group:
    """The steps of one program (or of similar sizes, if nothing is padded), in columns. `_fit` and `_trim` mutate it.

    Attributes:
        features: padded tokens, padded rows, KV tokens, attended positions, rows of each step.
        seconds: of each step. own: whether the program gets an intercept of its own.
        scale: its median time, in which its errors are measured. kept: 1 for steps that are not trimmed.
        extra: seconds of its own intercept.
    """

    key: Key
    features: tuple[list[int], ...] = field(default_factory=lambda: ([], [], [], [], []))
    seconds: list[float] = field(default_factory=list)
    own: bool = False
    scale: float = 1.0
    kept: bytes = b""
    extra: float = 0.0

    def residuals(self, coefficients: Sequence[float]) -> list[float]:
        """Seconds beyond what the coefficients say, the group's own intercept left out."""
        step, a, b, c, d, e = coefficients
        return [
            seconds - (step + a * tokens + b * rows + c * kv + d * attended + e * real)
            for seconds, tokens, rows, kv, attended, real in zip(self.seconds, *self.features, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Learnt:
    """A model and what it was made from: steps fitted to, and steps left out as outliers with their seconds."""

    model: FittedCost
    num_steps: int
    num_trimmed: int
    trimmed_seconds: float


def learn_cost(samples: Iterable[StepSample]) -> Learnt:
    """Fit a `FittedCost`. Deterministic; one reading of the samples.

    Raises ConfigError if fewer than 20 of them ran while the device was kept busy.
    """
    samples = list(samples)
    busy = [sample for sample in samples if not sample.started_after_idle]
    if len(busy) < MIN_STEPS:
        raise ConfigError(
            f"{len(busy)} of {len(samples)} steps ran right after another one; a cost needs {MIN_STEPS} such steps"
        )
    pads = any(_is_padded(sample) for sample in busy)
    groups = _grouped(busy, program_key if pads else _size_key)
    for group in groups:
        group.own = pads and len(group.seconds) >= MIN_PROGRAM_STEPS
    coefficients = _fit(groups)
    # A program of which only starts after idle were seen exists too, and has no intercept of its own.
    unseen = sorted({program_key(sample) for sample in samples} - {group.key for group in groups}) if pads else []
    programs = [_program(group) for group in groups] if pads else []
    trimmed = [seconds for group in groups for seconds, kept in zip(group.seconds, group.kept, strict=True) if not kept]
    least = min(seconds for group in groups for seconds in compress(group.seconds, group.kept))
    busy_model = FittedCost(
        SecondsPer(*coefficients), (*programs, *(Program(*key) for key in unseen)), least_seconds=least / 2
    )
    idle = _idle_seconds(busy_model, samples)
    model = FittedCost(busy_model.seconds_per, busy_model.programs, idle, least / 2)
    return Learnt(model, len(busy), len(trimmed), sum(trimmed))


def program_key(sample: StepSample) -> Key:
    """Padded tokens and rows of the program that ran a step, and whether it serves one-token rows only.

    A program with as many tokens as rows may be of either kind; the engine takes the one for one-token rows whenever
    the step has no others, whether or not those tokens are counted as prefill.
    """
    shape, padded_tokens, padded_rows, _, _ = sample
    return padded_tokens, padded_rows, padded_tokens == padded_rows and shape.num_tokens == shape.num_rows


def _size_key(sample: StepSample) -> Key:
    """Steps of about the same size."""
    shape = sample.shape
    return 1 << shape.num_tokens.bit_length(), 0, shape.num_tokens == shape.num_rows


def _is_padded(sample: StepSample) -> bool:
    return sample.padded_tokens > sample.shape.num_tokens or sample.padded_rows > sample.shape.num_rows


def _grouped(samples: Iterable[StepSample], key_of: Callable[[StepSample], Key]) -> list[_Group]:
    """In order of their keys, so that the order of samples does not matter."""
    groups: dict[Key, _Group] = {}
    for sample in samples:
        key = key_of(sample)
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group(key)
        shape = sample.shape
        tokens, rows, kv, attended, real = group.features
        tokens.append(sample.padded_tokens)
        rows.append(sample.padded_rows)
        kv.append(shape.num_kv_tokens)
        attended.append(shape.num_attended)
        real.append(shape.num_rows)
        group.seconds.append(sample.seconds)
    return [groups[key] for key in sorted(groups)]


def _fit(groups: Sequence[_Group]) -> list[float]:
    """Coefficients of the step and of the features. Mutates the groups: `scale`, `kept`, `extra`."""
    for group in groups:
        group.scale = median(group.seconds)
    coefficients = [0.0] * 6
    _trim(groups, coefficients, FIRST_CUT, first=True)
    for _ in range(MAX_ROUNDS):
        coefficients = _solve(groups)
        before = [group.kept for group in groups]
        _trim(groups, coefficients, CUT)
        if [group.kept for group in groups] == before:
            break
    coefficients = _solve(groups)
    for group in groups:
        group.extra = _extra(group, coefficients)
    return coefficients


def _trim(groups: Sequence[_Group], coefficients: Sequence[float], cut: float, first: bool = False) -> None:
    """Keep the steps within `cut` spreads of their group's centre. Mutates `kept`.

    The spread is the group's own where it has enough steps, and at least that of all groups together. A program that
    ran too seldom for a centre is compared with the common line (in the first round, which has none, with itself).
    """
    distances = []
    for group in groups:
        residuals = group.residuals(coefficients)
        centre = median(residuals) if first or len(residuals) >= MIN_PROGRAM_STEPS else 0.0
        distances.append([abs(residual - centre) / group.scale for residual in residuals])
    common = median([distance for group in distances for distance in group])
    for group, far in zip(groups, distances, strict=True):
        own = median(far) if len(far) >= MIN_STEPS else 0.0
        limit = cut * max(NORMAL * max(common, own), LEAST_SPREAD)
        group.kept = bytes(distance <= limit for distance in far)


def _solve(groups: Sequence[_Group]) -> list[float]:
    """Minimise the squared relative errors of kept steps over the coefficients and the programs' own intercepts.

    Each intercept is penalised by SHRINKAGE times its square. Its best value is then a share of its program's mean
    error, whatever the coefficients are; putting that in leaves equations of the coefficients alone.
    """
    gram = [[0.0] * 6 for _ in range(6)]
    moments = [0.0] * 6
    for group in groups:
        count = sum(group.kept)
        if not count:
            continue
        seconds = list(compress(group.seconds, group.kept))
        columns = [[1] * count, *(list(compress(column, group.kept)) for column in group.features)]
        sums, total = [sum(column) for column in columns], sum(seconds)
        share = 1 / (count + SHRINKAGE) if group.own else 0.0
        weight = 1 / group.scale**2
        for i, column in enumerate(columns):
            moments[i] += weight * (sumprod(column, seconds) - share * sums[i] * total)
            for j in range(i + 1):
                gram[i][j] += weight * (sumprod(column, columns[j]) - share * sums[i] * sums[j])
    return nonnegative_least_squares([[gram[max(i, j)][min(i, j)] for j in range(6)] for i in range(6)], moments)


def _extra(group: _Group, coefficients: Sequence[float]) -> float:
    """The program's own intercept: a share of the mean error of its kept steps."""
    kept = list(compress(group.residuals(coefficients), group.kept))
    return sum(kept) / (len(kept) + SHRINKAGE) if group.own and kept else 0.0


def _program(group: _Group) -> Program:
    return Program(*group.key, group.extra, sum(group.kept) if group.own else 0)


def _idle_seconds(model: FittedCost, samples: Iterable[StepSample]) -> float:
    """The median of what steps after idle took longer than the model says; 0 if there are none, or it is negative."""
    idle = [sample for sample in samples if sample.started_after_idle]
    if not idle:
        return 0.0
    predicted = [model.step_seconds(sample.shape) for sample in idle]
    longer: float = median(map(sub, (sample.seconds for sample in idle), predicted))
    return max(0.0, longer)
