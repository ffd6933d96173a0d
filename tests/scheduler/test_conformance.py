"""`scheduler.conformance`: the bundled policies have every property, and broken ones fail the property they break."""

import random
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from itertools import count

import pytest

from scheduler import ConfigError, Request, SchedulerConfig
from scheduler.conformance import PROPERTIES, ConformanceError, Report, check_policy
from scheduler.conformance.__main__ import main
from scheduler.policies import BUNDLED
from scheduler.policies.base import Charge, KnownTokens, LatestFirst, Order, Policy
from scheduler.queues import HeapQueue

pytestmark = pytest.mark.slow

# Shortest first starves long requests unless they age: it has the option to.
OPTIONS = {"sjf": {"aging_tokens_per_second": 20.0}}
CAPACITY_POLICIES = ("known_tokens", "reserve_to_completion")


def configured(name: str, capacity: str) -> SchedulerConfig:
    return SchedulerConfig(policy_options=OPTIONS.get(name, {}), capacity_policy=capacity)


@pytest.mark.parametrize("capacity", CAPACITY_POLICIES)
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_policies_keep_every_promise(name, capacity):
    report = check_policy(name, config=configured(name, capacity), max_examples=4)
    assert [result.name for result in report.results] == list(PROPERTIES)
    assert all(result.num_examples == 4 and not result.skipped for result in report.results)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capacity", CAPACITY_POLICIES)
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_policies_keep_every_promise_on_many_scripts(name, capacity):
    check_policy(name, config=configured(name, capacity), max_examples=150, seed=1)


@pytest.mark.parametrize("options", [{"quantum": 2, "promote_after_secs": 1.0}, {"quantum": 1, "num_levels": 2}])
def test_mlfq_with_quanta_so_short_that_it_evicts(options):
    check_policy("mlfq", config=SchedulerConfig(policy_options=options), max_examples=8)


def failures(factory: Callable[[SchedulerConfig], Policy], skip: Collection[str] = ("starvation",)) -> dict[str, str]:
    """Property → what went wrong. Streams take long, so most skip them."""
    with pytest.raises(ConformanceError) as raised:
        check_policy(factory, max_examples=12, skip=skip)
    return {result.name: result.failure for result in raised.value.report.failures if result.failure is not None}


class Losing(HeapQueue):
    """Forgets every third request."""

    def push(self, request: Request) -> None:
        if request.sequence % 3:
            super().push(request)


class Sleepy(HeapQueue):
    """Names nobody every other time it is asked."""

    asked = 0

    def peek(self, now: float) -> Request | None:
        self.asked += 1
        return super().peek(now) if self.asked % 2 else None

    def key(self) -> float:
        return 0.0


class Shy(HeapQueue):
    """Names nobody as long as only one waits."""

    def peek(self, now: float) -> Request | None:
        return super().peek(now) if len(self) > 1 else None

    def key(self) -> float:
        return 0.0


class Queueing(Order):
    def __init__(self, queue: type[HeapQueue]):
        self._queue = queue

    def make_queue(self) -> HeapQueue:
        return self._queue(lambda request: 0.0)


def test_a_queue_that_loses_a_request():
    found = failures(lambda config: Policy("losing", Queueing(Losing)))
    assert "r2 was given to the policy's queue, and is not in it" in found["conservation"]
    assert "r2 did not end" in found["completion"]


def test_a_queue_that_names_nobody_while_somebody_waits():
    found = failures(lambda config: Policy("sleepy", Queueing(Sleepy)))
    assert set(found) == {"work_conservation"}
    assert "nothing is planned" in found["work_conservation"] or "let nobody start" in found["work_conservation"]
    found = failures(lambda config: Policy("shy", Queueing(Shy)))
    assert {"work_conservation", "completion"} <= set(found)


class Keyed(Order):
    def __init__(self, key: Callable[[Request], float]):
        self.waiting_key = key  # type: ignore[method-assign]


def test_a_policy_that_draws_from_the_global_generator():
    found = failures(lambda config: Policy("dice", Keyed(lambda request: random.random())), skip=["starvation"])
    assert set(found) == {"determinism"}


def test_a_policy_that_counts_outside_itself():
    calls = count()
    found = failures(lambda config: Policy("global", Keyed(lambda request: next(calls) % 3)))
    assert "planned in two ways" in found["determinism"]


class Evicting(LatestFirst):
    evicts = True

    def __init__(self, rule: Callable[[Request, Request], bool]):
        self._rule = rule

    def may_evict(self, newcomer: Request, running: Request) -> bool:
        return self._rule(newcomer, running)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda newcomer, running: True, "put itself back"),
        (lambda newcomer, running: newcomer is not running, "started and was put back"),
        # Least attained service: equal ones take turns, and lose their work each time.
        (
            lambda newcomer, running: len(running.output_token_ids) > len(newcomer.output_token_ids),
            "put each other back again and again|in the same plan",
        ),
        # Bounded, but whoever comes in at the same moment goes at once.
        (
            lambda newcomer, running: newcomer is not running and not newcomer.num_preemptions,
            "started and was put back",
        ),
        (lambda newcomer, running: running.priority <= newcomer.priority < 0.1 and running.attempt == 0, "itself"),
    ],
)
def test_evictions_with_cycles(rule, words):
    found = failures(lambda config: Policy("cyclic", eviction=Evicting(rule)), skip=set(PROPERTIES) - {"preemption"})
    assert re.search(words, found["preemption"])


class Meddling(Charge):
    def __init__(self, meddle: Callable[[Request], None]):
        self._meddle = meddle

    def on_start(self, request: Request, now: float) -> None:
        self._meddle(request)


def test_a_policy_that_changes_what_the_client_asked_for():
    def shorten(request: Request) -> None:
        request.max_new_tokens = min(request.max_new_tokens, 2)

    found = failures(lambda config: Policy("shortening", charge=Meddling(shorten)))
    assert set(found) == {"purity", "tokens"}
    assert re.search(r"`charge.on_start` changed `max_new_tokens` of r\d+ from \d+ to 2", found["purity"])
    assert "alone it draws" in found["tokens"]


def test_a_policy_that_changes_progress():
    def forget(request: Request) -> None:
        request.num_computed_tokens = 0

    # Computing a shared page once more changes no token, so only the comparison finds it.
    found = failures(lambda config: Policy("forgetful", charge=Meddling(forget)), skip=["conservation", "starvation"])
    assert "changed `num_computed_tokens`" in found["purity"]


def test_a_key_that_writes_notes_on_the_request():
    def key(request: Request) -> float:
        request.predicted_new_tokens = 7.0
        return 0.0

    found = failures(lambda config: Policy("noting", Keyed(key)))
    assert set(found) == {"purity"}
    assert "`queue.push` changed `predicted_new_tokens`" in found["purity"]


class Greedy(KnownTokens):
    def fits(self, spare: int, head: Request, others: object, page_size: int) -> bool:
        return False


def test_a_capacity_that_nobody_ever_fits():
    found = failures(lambda config: Policy("full", capacity=Greedy()))
    assert {"work_conservation", "completion"} <= set(found)


def test_orders_that_starve():
    latest_first = failures(lambda config: Policy("lifo", Keyed(lambda request: -request.sequence)), skip=())
    assert set(latest_first) == {"starvation"}
    assert "has waited" in latest_first["starvation"]


@pytest.mark.parametrize("name", ["sjf", "priority"])
def test_bundled_orders_that_starve_without_ageing(name):
    config, others = SchedulerConfig(aging_per_second=0.0), set(PROPERTIES) - {"starvation"}
    with pytest.raises(ConformanceError, match=r"starvation: r\d has waited"):
        check_policy(name, config=config, max_examples=25, skip=others)
    check_policy(name, config=config, max_examples=2, skip=["starvation"])


class Crashing(Charge):
    def on_end(self, request: Request) -> None:
        raise KeyError(request.request_id)


def test_a_policy_that_raises():
    found = failures(lambda config: Policy("crashing", charge=Crashing()))
    assert "it raised KeyError: 'r0'" in found["conservation"]


def test_failures_show_the_smallest_script():
    found = failures(lambda config: Policy("crashing", charge=Crashing()), skip=set(PROPERTIES) - {"tokens"})
    assert found["tokens"].splitlines()[1:] == [
        "    1 slots, 64 tokens a step, 10 pages of 4, prefix reuse off, not pipelined, 0.1 s a step",
        "    r0 comes: 0 shared and 1 own prompt tokens, 0 new at most, priority 0.5",
    ]


def test_the_report_and_what_it_is_made_of():
    report = check_policy("fcfs", max_examples=3, seed=5, skip=["starvation"])
    assert isinstance(report, Report)
    assert (report.policy, report.failures) == ("fcfs", ())
    assert "starvation" in str(report)
    assert [result.name for result in report.results if result.skipped] == ["starvation"]


def test_the_configuration_reaches_the_policy():
    seen: list[str] = []

    class Spying(KnownTokens):
        def fits(self, spare: int, head: Request, others: object, page_size: int) -> bool:
            seen.append("its own")
            return super().fits(spare, head, others, page_size)  # type: ignore[arg-type]

    def factory(config: SchedulerConfig) -> Policy:
        return Policy("spying", capacity=Spying())

    check_policy(factory, max_examples=2)
    assert seen
    seen.clear()
    check_policy(factory, config=SchedulerConfig(capacity_policy="reserve_to_completion"), max_examples=2)
    assert not seen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"factory": "lifo"}, "unknown waiting_queue_policy 'lifo'"),
        ({"factory": "fcfs", "skip": ["speed"]}, "unknown property 'speed'; known: conservation"),
        ({"factory": "fcfs", "max_examples": 0}, "max_examples"),
        ({"factory": lambda config: "fcfs"}, "made a str, not a Policy"),
        (
            {"factory": lambda config: Policy("mine"), "config": SchedulerConfig(capacity_policy="all")},
            "capacity_policy 'all'; known: known_tokens, reserve_to_completion",
        ),
    ],
)
def test_mistakes_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        check_policy(**arguments)


def test_the_command_line(capsys):
    assert main(["fair", "--examples", "1", "--capacity", "reserve_to_completion"]) == 0
    assert "policy fair: 0 of 8 properties failed" in capsys.readouterr().out
    assert main(["sjf", "--examples", "15", "--seed", "3"]) == 1
    assert "has waited" in capsys.readouterr().out
    options = '{"aging_tokens_per_second": 20}'
    assert main(["sjf", "--examples", "2", "--options", options, "--skip", "tokens"]) == 0
    assert main(["lifo"]) == 2
    assert "unknown waiting_queue_policy" in capsys.readouterr().err
    assert main(["sjf", "--options", "[]"]) == 2


def test_without_hypothesis_it_says_what_to_install():
    script = """
import sys
sys.modules["hypothesis"] = None
from scheduler.conformance.__main__ import main

raise SystemExit(main(["fcfs"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_of_one_seed_are_alike():
    def crashing(config: SchedulerConfig) -> Policy:
        return Policy("crashing", charge=Crashing())

    reports = []
    for _ in range(2):
        with pytest.raises(ConformanceError) as raised:
            check_policy(crashing, max_examples=10, seed=11, skip=["starvation"])
        reports.append(raised.value.report)
    assert reports[0] == reports[1]
