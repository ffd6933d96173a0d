"""Policies by name: unknown ones, wrong options, and those that other packages register."""

import sys

import pytest

from scheduler import ConfigError, SchedulerConfig
from scheduler.policies import BUNDLED, make_policy, policy_names
from tests.scheduler.driver import make_request
from tests.scheduler.policy_cases import policy, queued, request, started

# -- unknown names and wrong values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sjf", {"ageing": 1}, "'sjf' has no option 'ageing'; it has aging_tokens_per_second, prefill_weight"),
        ("fcfs", {"window": 1}, "'fcfs' has no option 'window'; it has none"),
        ("priority", {"aging_per_second": 1}, "'priority' has no option 'aging_per_second'"),
        ("sjf", {"aging_tokens_per_second": -1}, "aging_tokens_per_second must not be negative, not -1"),
        ("sjf", {"prefill_weight": float("nan")}, "prefill_weight must be a finite number, not nan"),
        ("sjf", {"prefill_weight": "much"}, "prefill_weight must be a finite number, not 'much'"),
        ("sjf", {"prefill_weight": True}, "prefill_weight must be a finite number, not True"),
        ("deadline", {"ttft_secs": {"urgent": 1}}, "ttft_secs has no class 'urgent'; known: high, default, low"),
        ("deadline", {"ttft_secs": {"low": -1}}, r"ttft_secs\.low must not be negative"),
        ("deadline", {"itl_secs": 0}, "itl_secs must be greater than 0, not 0"),
        ("deadline", {"itl_secs": "fast"}, "itl_secs must be a table, not 'fast'"),
        ("fair", {"weights": {"a": 0}}, r"weights\.a must be greater than 0, not 0"),
        ("fair", {"weights": [1]}, "weights must be a table"),
        ("fair", {"weights": {1: 1}}, "weights must be a table"),
        ("fair", {"prompt_weight": 0}, "prompt_weight must be greater than 0"),
        ("mlfq", {"quantum": 0}, "quantum must be a whole number of at least 1, not 0"),
        ("mlfq", {"num_levels": 2.5}, "num_levels must be a whole number of at least 1, not 2.5"),
        ("mlfq", {"promote_after_secs": 0}, "promote_after_secs must be greater than 0"),
        ("prefix", {"window": 0}, "window must be a whole number"),
        ("prefix", {"max_wait_secs": float("inf")}, "max_wait_secs must be a finite number"),
    ],
)
def test_wrong_options_are_named(name, options, words):
    with pytest.raises(ConfigError, match=words):
        policy(name, **options)


def test_unknown_policies_and_capacities_name_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown waiting_queue_policy 'prioritty'; known: fcfs, .*did you mean 'pr"):
        policy("prioritty")
    with pytest.raises(ConfigError, match="capacity_policy 'all'; known: known_tokens, reserve_to_completion"):
        make_policy(SchedulerConfig(capacity_policy="all"))


# -- registered policies -----------------------------------------------------------------------------------------------

PLUGIN = '''
"""A policy of somebody else's."""

from scheduler.policies.base import Order, Policy


class Backwards(Order):
    def waiting_key(self, request):
        return -self.step * request.sequence


def backwards(config, step=1):
    order = Backwards()
    order.step = step
    return Policy("backwards", order)


def anything(config, **options):
    return Policy(",".join(sorted(options)))


def nothing(config):
    return None


number = 7
'''

ENTRY_POINTS = """[twinmesh.policies]
backwards = twinmesh_test_plugin:backwards
anything = twinmesh_test_plugin:anything
nothing = twinmesh_test_plugin:nothing
number = twinmesh_test_plugin:number
missing = twinmesh_test_plugin:missing
broken = twinmesh_test_plugin_that_is_not_there:policy
fcfs = twinmesh_test_plugin:backwards
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A distribution that is installed for one test."""
    (tmp_path / "twinmesh_test_plugin.py").write_text(PLUGIN)
    info = tmp_path / "twinmesh_test_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twinmesh-test-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("twinmesh_test_plugin", None)


@pytest.mark.usefixtures("plugin")
def test_a_registered_policy_is_found_by_name():
    assert policy_names()[: len(BUNDLED)] == tuple(BUNDLED)
    assert {"backwards", "anything"} <= set(policy_names())
    assert "twinmesh_test_plugin" not in sys.modules, "names are listed without importing anything"
    assert queued(policy("backwards"), request(1), request(2)) == [2, 1]
    assert queued(policy("backwards", step=-1), request(1), request(2)) == [1, 2]
    assert started("backwards", *(make_request(name, 4, 2) for name in "abc")) == ["c", "b", "a"]
    assert policy("anything", b=1, a=2).name == "a,b", "a factory may take any option"
    reserving = make_policy(SchedulerConfig(waiting_queue_policy="backwards", capacity_policy="reserve_to_completion"))
    assert type(reserving.capacity).__name__ == "ReserveToCompletion"


@pytest.mark.usefixtures("plugin")
def test_a_registered_policy_never_replaces_a_bundled_one():
    assert queued(policy("fcfs"), request(1), request(2)) == [1, 2]
    assert policy_names().count("fcfs") == 1


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("backwards", {"speed": 1}, "policy 'backwards' has no option 'speed'; it has step"),
        ("nothing", {}, "policy 'nothing' made a NoneType, not a Policy"),
        ("number", {}, "policy 'number' .* is not callable"),
        ("missing", {}, "policy 'missing' .* cannot be loaded: AttributeError"),
        ("broken", {}, "policy 'broken' .* cannot be loaded: ModuleNotFoundError"),
        ("backward", {}, "did you mean 'backwards'"),
    ],
)
def test_registered_policies_that_cannot_be_used(name, options, words):
    with pytest.raises(ConfigError, match=words):
        policy(name, **options)
