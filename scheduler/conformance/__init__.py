"""Does a policy keep its promises? `check_policy` tries it on random scripts; for authors of policies, and our tests.

`check_policy("my_policy")` in a test, or `python -m scheduler.conformance my_policy` in a shell. It needs hypothesis
(`pip install 'twinmesh[test]'`), which is imported only when something is checked. docs/policies.md is the tutorial.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scheduler.config import SchedulerConfig
from scheduler.conformance.properties import PROPERTIES, Build, Property
from scheduler.conformance.scripts import Script, Stream, script_strategy, stream_strategy
from scheduler.conformance.watch import Violation
from scheduler.errors import ConfigError
from scheduler.policies import PolicyFactory, make_policy
from scheduler.policies.base import CAPACITIES, Policy

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_MOST_SHRINKS = 150


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """What became of one property.

    Attributes:
        promise: what a policy that has it does, in words.
        num_examples: scripts that were played.
        failure: what the policy did wrong, with the smallest script that shows it; None if nothing was found.
        skipped: it was not tried.
    """

    name: str
    promise: str
    num_examples: int = 0
    failure: str | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """All properties of one policy. `str(report)` is for people."""

    policy: str
    results: tuple[PropertyResult, ...]

    @property
    def failures(self) -> tuple[PropertyResult, ...]:
        """Those that failed."""
        return tuple(result for result in self.results if result.failure is not None)

    def __str__(self) -> str:
        lines = [f"policy {self.policy}: {len(self.failures)} of {len(self.results)} properties failed"]
        for result in self.results:
            state = "skipped" if result.skipped else "ok" if result.failure is None else "FAILED"
            lines.append(f"  {result.name:<18}{state:<8}{result.num_examples:>6} examples  {result.promise}")
        for result in self.failures:
            lines.append(f"\n{result.name}: {result.failure}")
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A policy broke a property. `report` has all of them; the message is the report as text."""

    def __init__(self, report: Report):
        super().__init__(str(report))
        self.report = report


def check_policy(
    factory: str | PolicyFactory,
    *,
    config: SchedulerConfig | None = None,
    max_examples: int = 100,
    seed: int | None = None,
    skip: Collection[str] = (),
) -> Report:
    """Try a policy on random scripts, property by property (`PROPERTIES`).

    Args:
        factory: the name of a bundled or registered policy, or a callable that makes a new policy at every call, from
            the configuration and `policy_options`.
        config: the policy's options, capacity rule, ageing and preemption; its limits are replaced by drawn ones.
        max_examples: scripts for each property.
        seed: of the draws; without one they are the same every time.
        skip: names of properties that are not tried. A policy that starves by design skips `starvation`.

    Raises:
        ConformanceError: a property failed. All others were tried too.
        ConfigError: the policy, an option or the name of a property is unknown, or a value is wrong.
        ModuleNotFoundError: hypothesis is not installed.
    """
    unknown = sorted(set(skip) - set(PROPERTIES))
    if unknown:
        raise ConfigError(f"unknown property {unknown[0]!r}; known: {', '.join(PROPERTIES)}")
    if max_examples < 1:
        raise ConfigError(f"max_examples must be at least 1, not {max_examples}")
    _require_hypothesis()
    config = SchedulerConfig() if config is None else config
    build = _builder(factory, config)
    results = []
    for name, entry in PROPERTIES.items():
        if name in skip:
            results.append(PropertyResult(name, entry.promise, skipped=True))
        else:
            results.append(_try(name, entry, build, config, max_examples, seed))
    report = Report(build().name, tuple(results))
    if report.failures:
        raise ConformanceError(report)
    return report


def _require_hypothesis() -> None:
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        message = "checking a policy needs hypothesis: pip install 'twinmesh[test]', or pip install hypothesis"
        raise ModuleNotFoundError(message, name="hypothesis") from error


def _builder(factory: str | PolicyFactory, config: SchedulerConfig) -> Build:
    """A way to make new policy objects. Raises ConfigError if that does not work even once."""
    if isinstance(factory, str):
        named = replace(config, waiting_queue_policy=factory)
        make_policy(named)
        return lambda: make_policy(named)
    if config.capacity_policy not in CAPACITIES:
        raise ConfigError(f"unknown capacity_policy {config.capacity_policy!r}; known: {', '.join(CAPACITIES)}")

    def build() -> Policy:
        policy = factory(config, **config.policy_options)
        if not isinstance(policy, Policy):
            raise ConfigError(f"the factory made a {type(policy).__name__}, not a Policy")
        keeps_its_own = config.capacity_policy == "known_tokens"  # as in `make_policy`
        return policy if keeps_its_own else replace(policy, capacity=CAPACITIES[config.capacity_policy]())

    build()
    return build


def _try(
    name: str, entry: Property, build: Build, config: SchedulerConfig, max_examples: int, seed: int | None
) -> PropertyResult:
    if entry.check_script is not None:
        return _Trial(name, entry.promise, build, config, entry.check_script).run(
            script_strategy(entry.aborts), max_examples, seed
        )
    if entry.check_stream is not None:
        return _Trial(name, entry.promise, build, config, entry.check_stream).run(stream_strategy(), max_examples, seed)
    raise TypeError(f"property {name} has no check")


class _SmallEnough(BaseException):
    """Ends a run of hypothesis, which would go on shrinking for long; not an Exception, which would be a failure."""


class _Trial[Example: Script | Stream]:
    """One property under hypothesis. `run` mutates; it returns the failure of the smallest example."""

    def __init__(
        self,
        name: str,
        promise: str,
        build: Build,
        config: SchedulerConfig,
        check: Callable[[Build, SchedulerConfig, Example], None],
    ):
        self._name = name
        self._promise = promise
        self._build = build
        self._config = config
        self._check = check
        self._num_examples = 0
        self._num_shrinks = 0
        self._failure: str | None = None

    def run(self, examples: "SearchStrategy[Example]", max_examples: int, seed: int | None) -> PropertyResult:
        """Draw examples, and shrink the first that fails."""
        import hypothesis

        test = hypothesis.given(examples)(self._play)
        if seed is not None:
            test = hypothesis.seed(seed)(test)
        test = hypothesis.settings(
            max_examples=max_examples,
            deadline=None,
            database=None,
            derandomize=seed is None,
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=hypothesis.Verbosity.quiet,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
        )(test)
        try:
            test()
        except (Violation, hypothesis.errors.Flaky, _SmallEnough):
            if self._failure is None:
                raise
        return PropertyResult(self._name, self._promise, self._num_examples, self._failure)

    def _play(self, example: Example) -> None:
        if self._failure is None:
            self._num_examples += 1
        elif self._num_shrinks == _MOST_SHRINKS:
            raise _SmallEnough
        else:
            self._num_shrinks += 1
        try:
            self._check(self._build, self._config, example)
        except Violation as violation:
            message = str(violation)
        except Exception as error:  # whatever somebody else's policy raises is its failure
            message = f"it raised {type(error).__name__}: {error}"
        else:
            return
        # The last example that fails is the smallest one.
        self._failure = f"{message}\n{example.describe()}".replace("\n", "\n    ")
        raise Violation(message)


__all__ = ["PROPERTIES", "ConformanceError", "PropertyResult", "Report", "check_policy"]
