"""How good a fitted cost is: its errors on steps that it was not fitted to. For the command line and for tests."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from random import Random

from scheduler.costs.fitted import FittedCost
from scheduler.costs.learning import Learnt, learn_cost
from scheduler.errors import ConfigError
from scheduler.simulation.records import CostModel, StepSample, StepShape

# Steps of a block that is held out together; a run has at least about so many blocks, if need be shorter ones.
BLOCK_STEPS = 100
MIN_BLOCKS = 20
# A step that took so many times what the model says is a hiccup of the machine, or a compilation.
HICCUP = 3.0
KINDS = ("decode only", "prefill only", "mixed")


@dataclass(frozen=True, slots=True)
class FitErrors:
    """How far a model is from some measured steps. Shares, not percent; all 0 if there were no steps.

    Attributes:
        name: which steps. num_steps: how many. seconds: what they took together.
        mean_error: mean of |predicted - measured| / measured.
        weighted_error: Σ |predicted - measured| / Σ measured.
        p95_error: what 95 % of the steps' |predicted - measured| / measured do not exceed.
        bias: Σ predicted / Σ measured; 1 is right.
    """

    name: str
    num_steps: int = 0
    seconds: float = 0.0
    mean_error: float = 0.0
    weighted_error: float = 0.0
    p95_error: float = 0.0
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fitted model and its errors.

    Attributes:
        model: fitted to all samples.
        errors: of a model fitted in the same way to all but the held-out steps, on those: `all`; by kind
            (`decode only`, `prefill only`, `mixed`); `after idle`; and `without hiccups`, which leaves out the steps
            that took over 3 times what was predicted.
        num_steps, num_trimmed, trimmed_seconds: steps that `model` was fitted to, and those of them left out.
    """

    model: FittedCost
    errors: tuple[FitErrors, ...]
    num_steps: int
    num_trimmed: int
    trimmed_seconds: float


def fit_cost(samples: Iterable[StepSample], holdout: float = 0.2, seed: int = 0) -> FitReport:
    """Fit a cost and measure its error on a share `holdout` of the steps. Deterministic by `seed`.

    Held out are whole blocks of 100 consecutive steps (shorter ones in a short run), chosen at random. Neighbouring
    steps run the same rows with a few more positions each, on a machine in the same state: steps picked one by one
    would each have a twin in the fit, and the error would be that of remembering.

    Raises ConfigError if `holdout` is not between 0 and 1 or too few steps are left.
    """
    samples = list(samples)
    if not 0 < holdout < 1:
        raise ConfigError(f"holdout is {holdout}; it must be greater than 0 and less than 1")
    held = held_out(len(samples), holdout, seed)
    fitted = learn_cost(sample for i, sample in enumerate(samples) if i not in held)
    errors = evaluate(fitted.model, [samples[i] for i in sorted(held)])
    final: Learnt = learn_cost(samples)
    return FitReport(final.model, errors, final.num_steps, final.num_trimmed, final.trimmed_seconds)


def held_out(count: int, share: float, seed: int) -> set[int]:
    """Positions of the steps to hold out of `count`: whole blocks, at least one, never all."""
    length = max(1, min(BLOCK_STEPS, count // MIN_BLOCKS))
    num_blocks = ceil(count / length)
    if num_blocks < 2:
        raise ConfigError(f"{count} steps are too few to hold some out")
    chosen = Random(seed).sample(range(num_blocks), min(num_blocks - 1, max(1, round(share * num_blocks))))
    return {i for block in chosen for i in range(block * length, min(count, (block + 1) * length))}


def evaluate(model: CostModel, samples: Sequence[StepSample]) -> tuple[FitErrors, ...]:
    """Errors of any cost model on measured steps, in total, by kind, after idle and without hiccups."""
    idle = model.idle_start_seconds()
    pairs = [
        (sample, model.step_seconds(sample.shape) + (idle if sample.started_after_idle else 0.0)) for sample in samples
    ]
    parts: list[tuple[str, Callable[[StepSample, float], bool]]] = [
        ("all", lambda sample, predicted: True),
        *((kind, partial(_is_of, kind)) for kind in KINDS),
        ("after idle", lambda sample, predicted: sample.started_after_idle),
        ("without hiccups", lambda sample, predicted: sample.seconds <= HICCUP * predicted),
    ]
    return tuple(_errors(name, [pair for pair in pairs if wanted(*pair)]) for name, wanted in parts)


def kind_of(shape: StepShape) -> str:
    """One of `KINDS`."""
    if not shape.num_prefill_tokens:
        return KINDS[0]
    return KINDS[1] if shape.num_prefill_tokens == shape.num_tokens else KINDS[2]


def _is_of(kind: str, sample: StepSample, predicted: float) -> bool:
    return kind_of(sample.shape) == kind


def format_report(report: FitReport) -> str:
    """A plain-text table of the errors and a few lines about the model."""
    lines = [
        f"{'held-out steps':<16}{'steps':>8}{'seconds':>11}{'MAPE':>9}{'weighted':>10}{'p95':>9}{'bias':>8}",
        *(_line(errors) for errors in report.errors),
        "",
        f"fitted to {report.num_steps} steps; {report.num_trimmed} outliers of {report.trimmed_seconds:.3f} s left out",
        f"a start after idle takes {report.model.idle_seconds * 1e3:.3f} ms longer",
        "",
        f"{'program':<28}{'seconds':>12}{'samples':>9}",
    ]
    for program in report.model.programs:
        name = f"{program.num_tokens} tokens, {program.num_rows} rows"
        kind = " of one" if program.single_token_rows else ""
        lines.append(f"{name + kind:<28}{report.model.program_seconds(program):>12.6f}{program.num_samples:>9}")
    per = report.model.seconds_per
    lines.append("")
    lines.extend(
        f"seconds per {name:<14}{value:>11.3e}"
        for name, value in (
            ("step", per.step),
            ("padded token", per.padded_token),
            ("padded row", per.padded_row),
            ("KV token", per.kv_token),
            ("attended", per.attended),
            ("row", per.row),
        )
    )
    return "\n".join(lines)


def _line(errors: FitErrors) -> str:
    name = f"{errors.name:<16}{errors.num_steps:>8}"
    if not errors.num_steps:
        return f"{name}{'-':>11}{'-':>9}{'-':>10}{'-':>9}{'-':>8}"
    shares = f"{errors.mean_error:>9.1%}{errors.weighted_error:>10.1%}{errors.p95_error:>9.1%}"
    return f"{name}{errors.seconds:>11.3f}{shares}{errors.bias:>8.3f}"


def _errors(name: str, pairs: Sequence[tuple[StepSample, float]]) -> FitErrors:
    if not pairs:
        return FitErrors(name)
    measured = sum(sample.seconds for sample, _ in pairs)
    absolute = [abs(predicted - sample.seconds) for sample, predicted in pairs]
    relative = sorted(error / sample.seconds for error, (sample, _) in zip(absolute, pairs, strict=True))
    return FitErrors(
        name,
        num_steps=len(pairs),
        seconds=measured,
        mean_error=sum(relative) / len(relative),
        weighted_error=sum(absolute) / measured,
        p95_error=relative[ceil(0.95 * len(relative)) - 1],
        bias=sum(predicted for _, predicted in pairs) / measured,
    )
