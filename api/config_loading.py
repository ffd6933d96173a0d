"""From the command line to one frozen `ServerConfig`. Called by `api/serve.py` before anything else.

Precedence: flag, then `--set`, then environment, then the YAML file, then the default. Whatever is wrong is one
`ConfigError` of one line, with no key or other secret in it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from api.config import ServerConfig, unsupported_setting
from api.config_sources import (
    SECRET_KEYS,
    ConfigError,
    from_assignments,
    from_environment,
    from_file,
    leaves,
    merge,
    variable_name,
)
from api.faults import SUPPORTED_POINTS, FaultError, parse_action

ALLOW_FAULTS = "TWINMESH_ALLOW_FAULTS"


@dataclass(frozen=True, slots=True)
class Launch:
    """What the command line asked for. `client_keys` are those of the configuration and of the key file."""

    config: ServerConfig
    client_keys: tuple[str, ...]
    print_config: bool


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Read every source and check the result. Exits for `--help`, as argparse does.

    Raises:
        ConfigError: something is wrong; the message is one line.
    """
    options = _parse(arguments)
    values: dict[str, Any] = {}
    if options.config is not None:
        values = from_file(Path(options.config).expanduser())
    values = merge(values, from_environment(environment))
    values = merge(values, from_assignments(options.set))
    flags = {name: getattr(options, name) for name in ("model", "host", "port")}
    values = merge(values, {name: value for name, value in flags.items() if value is not None})
    config = resolve(values, allow_faults=environment.get(ALLOW_FAULTS) == "1")
    try:
        keys = tuple(config.client_keys())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Launch(config, keys, options.print_config)


def resolve(values: Mapping[str, Any], allow_faults: bool = False) -> ServerConfig:
    """Check plain values and make them a configuration. Raises ConfigError."""
    try:
        config = ServerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None
    unsupported = unsupported_setting(config)
    if unsupported is not None:
        raise ConfigError(f"{unsupported}: this value is not supported yet; leave the key out")
    _check_faults(config, allow_faults)
    return config


def to_yaml(config: ServerConfig) -> str:
    """The resolved configuration, keys redacted."""
    return yaml.safe_dump(config.redacted(), sort_keys=False, default_flow_style=False, allow_unicode=True)


def _check_faults(config: ServerConfig, allowed: bool) -> None:
    if not config.faults:
        return
    if not allowed:
        raise ConfigError(
            f"faults: refused; they break the server on purpose and need {ALLOW_FAULTS}=1 in the environment"
        )
    for index, fault in enumerate(config.faults):
        if fault.point not in SUPPORTED_POINTS:
            raise ConfigError(f"faults.{index}.point: {fault.point!r} is not supported yet")
        try:
            parse_action(fault.action)
        except FaultError as error:
            raise ConfigError(f"faults.{index}.action: {error}") from None


def _first_problem(error: ValidationError) -> str:
    """The first complaint, in one line. Values of secrets are never quoted."""
    problem = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = problem.get("input")
    is_secret = bool(problem["loc"]) and problem["loc"][0] in SECRET_KEYS
    if is_secret or isinstance(given, (dict, list, BaseModel)) or problem["type"] == "value_error":
        return f"{path}: {message}" if path else message
    shown = repr(given)
    return f"{path}: {message}, not {shown if len(shown) <= 80 else shown[:77] + '…'}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m api.serve",
        description="Serve a language model over HTTP. With no arguments: the built-in model, on this machine only.",
        epilog=_help_on_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a YAML file")
    parser.add_argument("--model", metavar="M", help="what to serve")
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on; 0: any free one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="one setting; may be repeated"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings as YAML and exit")
    options, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        # Only the option's name: a value might be a key.
        name = unknown[0].partition("=")[0] if unknown[0].startswith("-") else "a stray argument"
        raise ConfigError(f"unknown option {name}; settings are given as --set key.path=value, see --help")
    return options


def _help_on_keys() -> str:
    lines = [
        "Settings: a flag goes before --set, that before the environment, that before the YAML file.",
        f"The variable of a.b is {variable_name('a.b')}; lists of texts are separated by commas there.",
        "",
    ]
    for path, field in leaves():
        default = json.dumps(_default_of(field))
        lines.append(f"  {path} = {default}  ({_type_of(field)})")
        if field.description:
            lines.append(f"      {field.description}")
    return "\n".join(lines).replace("%", "%%")


def _default_of(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True, validated_data={})
    return default.value if isinstance(default, Enum) else default


def _type_of(field: FieldInfo) -> str:
    """The type of a setting as an operator would say it."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is list:
        return "list"
    names = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null", SecretStr: "text"}
    kinds = [
        get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(annotation) or (annotation,)
    ]
    return " | ".join(names.get(kind, "mapping" if get_origin(kind) is dict else "list") for kind in kinds)
