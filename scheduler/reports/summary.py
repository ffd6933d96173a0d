"""From a run to the numbers that are reported. Pure; tables, CSV files and pages are made of its `Summary`.

Times are seconds and tokens are counts; units are chosen where numbers are shown.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub

from scheduler.reports.fairness import Fairness, fairness
from scheduler.reports.lifecycle import left_at
from scheduler.reports.objectives import CLASSES, FINISHED, Objective, Objectives, attains
from scheduler.reports.statistics import Distribution, quantile_curve
from scheduler.request import priority_class
from scheduler.simulation.records import Outcome, RunResult

NO_TENANT = "(no tenant)"


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by what became of them; `unfinished` are those still in the system when the run ended."""

    total: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    errors: int = 0
    unfinished: int = 0


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Some requests of a run: all, those of a class, or those of a tenant.

    Attributes:
        ttft: arrival to first token, of the requests that have one. itl: between consecutive tokens, over all tokens.
        e2e: arrival to end, of finished requests.
        attainment: the share of all requests that attain their objectives, None of no requests.
        goodput: requests/s that attain, over the run's span; None of a span of no length.
    """

    counts: Counts
    ttft: Distribution
    itl: Distribution
    e2e: Distribution
    attainment: float | None
    goodput: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One run, in numbers. What could not be measured is None.

    Attributes:
        labels: what the run was. duration_secs: when its last event happened.
        span_secs: from the first arrival to when the last request left; rates are over this.
        requests_per_sec: of finished requests. output_tok_s: of all output tokens, those of aborted requests too.
        queue: from reaching a scheduler to being planned first, of requests that came to it.
        wasted_tokens: positions computed and then lost to preemption. wasted_share: of all positions computed, that is
            prompts but for their cached tokens, of requests that have a first token; output tokens but for each
            request's last; and those wasted.
        prefix_hit_rate: tokens found in the prefix caches / tokens asked of them.
        transfers, transfer_secs: requests whose pages moved between workers, and the seconds of all of them.
        by_class: of the classes that occur, lowest first. by_tenant: sorted by name, `NO_TENANT` for nobody's.
        ttft_curve, itl_curve: values at `statistics.QUANTILE_GRID`, or empty.
    """

    labels: Mapping[str, str]
    duration_secs: float
    span_secs: float
    overall: GroupSummary
    requests_per_sec: float | None
    output_tok_s: float | None
    queue: Distribution
    preemptions: int
    wasted_tokens: int
    wasted_share: float | None
    prefix_hit_rate: float | None
    transfers: int
    transfer_secs: float
    num_steps: int
    fairness: Fairness
    by_class: Mapping[str, GroupSummary]
    by_tenant: Mapping[str, GroupSummary]
    ttft_curve: tuple[float, ...] = field(default=(), repr=False)
    itl_curve: tuple[float, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class _Samples:
    """What is collected of a group. The numbers ascend once `sort` was called, and stay so in what `_merged` returns.

    Arrays, as sorted lists of millions of floats are slow to walk: their objects lie all over the memory.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    attained: int = 0
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    itls: array[float] = field(default_factory=lambda: array("d"))
    e2es: array[float] = field(default_factory=lambda: array("d"))

    def add(self, outcome: Outcome, objective: Objective) -> None:
        self.reasons[outcome.finish_reason] += 1
        self.attained += attains(outcome, objective)
        ttft, latency, times = outcome.ttft, outcome.latency, outcome.token_times
        if ttft is not None:
            self.ttfts.append(ttft)
        if latency is not None and outcome.finish_reason in FINISHED:
            self.e2es.append(latency)
        self.itls.extend(map(sub, times[1:], times))

    def sort(self) -> None:
        self.ttfts, self.itls, self.e2es = (array("d", sorted(kind)) for kind in (self.ttfts, self.itls, self.e2es))


def summarise(result: RunResult, objectives: Objectives | None = None) -> Summary:
    """The numbers of one run. Without objectives, every finished request attains."""
    outcomes = result.outcomes
    end = max((left_at(outcome, result.duration) for outcome in outcomes), default=0.0)
    span = end - min((outcome.arrival.time for outcome in outcomes), default=0.0)
    cells = _collect(outcomes, objectives or Objectives())
    classes, tenants = (_by_part_of_key(cells, part) for part in range(2))
    everything = _merged(list(classes.values()))
    wasted = sum(outcome.num_wasted_tokens for outcome in outcomes)
    computed = wasted + sum(map(_useful_tokens, outcomes))
    finished = sum(everything.reasons[reason] for reason in FINISHED)
    return Summary(
        labels=dict(result.labels),
        duration_secs=result.duration,
        span_secs=span,
        overall=_group(everything, span),
        requests_per_sec=_ratio(finished, span),
        output_tok_s=_ratio(sum(len(outcome.token_times) for outcome in outcomes), span),
        queue=Distribution.of_sorted(_queue_times(outcomes)),
        preemptions=sum(outcome.num_preemptions for outcome in outcomes),
        wasted_tokens=wasted,
        wasted_share=_ratio(wasted, computed),
        prefix_hit_rate=_ratio(result.num_prefix_hits, result.num_prefix_queries),
        transfers=sum(outcome.transfer_seconds > 0 for outcome in outcomes),
        transfer_secs=sum(outcome.transfer_seconds for outcome in outcomes),
        num_steps=result.num_steps,
        fairness=fairness(outcomes, end),
        by_class={name: _group(classes[name], span) for name in CLASSES if name in classes},
        by_tenant={name: _group(tenants[name], span) for name in sorted(tenants)},
        ttft_curve=quantile_curve(everything.ttfts),
        itl_curve=quantile_curve(everything.itls),
    )


def _collect(outcomes: Iterable[Outcome], objectives: Objectives) -> dict[tuple[str, str], _Samples]:
    """By class and tenant. Sorted here, so that a group of several cells has only runs to merge."""
    bounds = {name: objectives.of(name) for name in CLASSES}
    cells: dict[tuple[str, str], _Samples] = {}
    for outcome in outcomes:
        arrival = outcome.arrival
        name = priority_class(arrival.priority)
        key = (name, NO_TENANT if arrival.tenant is None else arrival.tenant)
        samples = cells.get(key)
        if samples is None:
            samples = cells[key] = _Samples()
        samples.add(outcome, bounds[name])
    for samples in cells.values():
        samples.sort()
    return cells


def _by_part_of_key(cells: Mapping[tuple[str, str], _Samples], part: int) -> dict[str, _Samples]:
    groups: dict[str, list[_Samples]] = {}
    for key, samples in cells.items():
        groups.setdefault(key[part], []).append(samples)
    return {name: _merged(parts) for name, parts in groups.items()}


def _merged(parts: Sequence[_Samples]) -> _Samples:
    if len(parts) == 1:
        return parts[0]
    whole = _Samples()
    for part in parts:
        whole.reasons.update(part.reasons)
        whole.attained += part.attained
        whole.ttfts += part.ttfts
        whole.itls += part.itls
        whole.e2es += part.e2es
    whole.sort()
    return whole


def _group(samples: _Samples, span: float) -> GroupSummary:
    reasons = samples.reasons
    total = reasons.total()
    return GroupSummary(
        counts=Counts(
            total,
            sum(reasons[reason] for reason in FINISHED),
            reasons["refused"],
            reasons["abort"],
            reasons["error"],
            reasons[""],
        ),
        ttft=Distribution.of_sorted(samples.ttfts),
        itl=Distribution.of_sorted(samples.itls),
        e2e=Distribution.of_sorted(samples.e2es),
        attainment=_ratio(samples.attained, total),
        goodput=_ratio(samples.attained, span),
    )


def _queue_times(outcomes: Iterable[Outcome]) -> list[float]:
    return sorted(outcome.started_at - outcome.queued_at for outcome in outcomes if outcome.started_at is not None)


def _useful_tokens(outcome: Outcome) -> int:
    if outcome.first_token_at is None:
        return 0
    return outcome.arrival.input_length - outcome.num_cached_tokens + max(len(outcome.token_times) - 1, 0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
