"""Policies by name: the bundled ones, a file each, and those that other packages register.

A package adds one with an entry point in the group `twinmesh.policies` whose value is a factory: `factory(config,
**options) -> Policy`. `scheduler_config.waiting_queue_policy` and the simulator's `--policies` then find it by name.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError
from scheduler.policies.base import (
    CAPACITIES,
    Capacity,
    Charge,
    Eviction,
    KnownTokens,
    LatestFirst,
    Order,
    Policy,
    ReserveToCompletion,
)
from scheduler.policies.deadline import deadline
from scheduler.policies.fair import fair
from scheduler.policies.fcfs import fcfs
from scheduler.policies.mlfq import mlfq
from scheduler.policies.prefix import prefix
from scheduler.policies.priority import priority
from scheduler.policies.sjf import sjf

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "twinmesh.policies"

PolicyFactory = Callable[..., Policy]

BUNDLED: dict[str, PolicyFactory] = {
    "fcfs": fcfs,
    "priority": priority,
    "sjf": sjf,
    "deadline": deadline,
    "fair": fair,
    "mlfq": mlfq,
    "prefix": prefix,
}


def policy_names() -> tuple[str, ...]:
    """The bundled policies, then the registered ones. Reads package metadata, imports nothing."""
    return (*BUNDLED, *sorted(set(_registered()) - set(BUNDLED)))


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that a configuration names, with its options and its capacity rule.

    Raises:
        ConfigError: the name or an option is unknown, a value is wrong, or a registered policy cannot be loaded.
    """
    factory = _factory(config.waiting_queue_policy)
    options = dict(config.policy_options)
    allowed = _options_of(factory)
    for name in options:
        if allowed is not None and name not in allowed:
            known = f"it has {', '.join(sorted(allowed))}" if allowed else "it has none"
            raise ConfigError(f"policy {config.waiting_queue_policy!r} has no option {name!r}; {known}")
    policy = factory(config, **options)
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy {config.waiting_queue_policy!r} made a {type(policy).__name__}, not a Policy")
    if config.capacity_policy not in CAPACITIES:
        raise ConfigError(f"unknown capacity_policy {config.capacity_policy!r}; known: {', '.join(CAPACITIES)}")
    if config.capacity_policy == "known_tokens":
        return policy  # the default, so that a policy may bring its own
    return replace(policy, capacity=CAPACITIES[config.capacity_policy]())


def _factory(name: str) -> PolicyFactory:
    if name in BUNDLED:
        return BUNDLED[name]
    entry = _registered().get(name)
    if entry is None:
        known = policy_names()
        close = get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown waiting_queue_policy {name!r}; known: {', '.join(known)}{hint}")
    try:
        loaded = entry.load()
    except Exception as error:  # anything may happen while somebody else's module is imported
        raise ConfigError(
            f"policy {name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(loaded):
        raise ConfigError(f"policy {name!r} ({entry.value}) is not callable")
    factory: PolicyFactory = loaded
    return factory


def _registered() -> "dict[str, EntryPoint]":
    # Not above: it is slow to import, and bundled policies do not need it.
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _options_of(factory: PolicyFactory) -> set[str] | None:
    """Names of the options, or None if the factory takes any."""
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


__all__ = [
    "BUNDLED",
    "CAPACITIES",
    "ENTRY_POINT_GROUP",
    "Capacity",
    "Charge",
    "Eviction",
    "KnownTokens",
    "LatestFirst",
    "Order",
    "Policy",
    "PolicyFactory",
    "ReserveToCompletion",
    "make_policy",
    "policy_names",
]
