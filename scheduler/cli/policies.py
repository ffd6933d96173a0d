"""Policies as they are written on a command line: `fcfs`, `sjf(aging_tokens_per_second=20)`, with commas between.

Values are numbers, `true`, `false`, or text; a key with dots is a table: `fair(weights.alice=2)`.
"""

import re
from dataclasses import dataclass, replace

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError
from scheduler.policies import make_policy

_PART = re.compile(r"\s*([\w.-]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with its options. `text` is how the user wrote it."""

    text: str
    name: str
    options: dict[str, object]

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """The configuration with this policy. Raises ConfigError if the policy or an option is unknown."""
        chosen = replace(config, waiting_queue_policy=self.name, policy_options=self.options)
        make_policy(chosen)
        return chosen


def parse_policies(text: str) -> tuple[PolicyChoice, ...]:
    """All policies of a comma-separated list. Raises ConfigError for text that cannot be read."""
    choices, position = [], 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise ConfigError(
                f"policies {text!r}: cannot read from {text[position:]!r} on; write name or name(key=value)"
            )
        name, options = match.group(1), match.group(2)
        written = name if options is None else f"{name}({options.strip()})"
        choices.append(PolicyChoice(written, name, _options(written, options or "")))
        position = match.end()
    if not choices:
        raise ConfigError("no policy is named")
    if len({choice.text for choice in choices}) < len(choices):
        raise ConfigError(f"policies {text!r}: one is named twice")
    return tuple(choices)


def _options(policy: str, text: str) -> dict[str, object]:
    options: dict[str, object] = {}
    for part in filter(None, re.split(r"[;,]\s*", text.strip())):
        key, separator, value = part.partition("=")
        if not separator:
            raise ConfigError(f"policy {policy}: option {part!r} has no value; write key=value")
        table, *path = key.strip().split(".")
        if not path:
            if table in options:
                raise ConfigError(f"policy {policy}: {table} is given twice")
            options[table] = parse_value(value.strip())
            continue
        inner = options.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"policy {policy}: {table} is both a value and a table")
        if (inner_key := ".".join(path)) in inner:
            raise ConfigError(f"policy {policy}: {key.strip()} is given twice")
        inner[inner_key] = parse_value(value.strip())
    return options


def parse_value(text: str) -> object:
    """A number, `true`, `false`, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
