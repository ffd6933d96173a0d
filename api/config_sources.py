"""Where settings come from: a YAML file, the environment, and `--set`. Each becomes a nested mapping of plain values.

Called by `api/config_loading.py`, which lays them over each other. Unknown keys are found here, so that the message can
name the nearest key that exists.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from api.config import ServerConfig

ENVIRONMENT_PREFIX = "TWINMESH_"
# Variables of ours that are not configuration keys.
RESERVED = frozenset({"TWINMESH_CACHE", "TWINMESH_ALLOW_FAULTS"})
SECRET_KEYS = frozenset({"api_keys", "admin_keys"})

# What Kubernetes puts into every container for a service that happens to be called `twinmesh…`.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

# Below this share of common letters, naming a "nearest" key would only puzzle.
LEAST_LIKENESS = 0.6


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the operator and holds no secret."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads `1e-3` as a number."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(f"line {key_node.start_mark.line + 1}: a key must be text, not {key!r}")
        if key in seen:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice")
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, origin: str) -> Any:
    """Plain values. Raises ConfigError, which names `origin` and the line but quotes nothing."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{origin}, {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{origin}{line}: not valid YAML ({error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not valid YAML ({type(error).__name__})") from None


def from_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. An empty file sets nothing. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or type(error).__name__}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys")
    check_keys(values, str(path))
    # A section whose every line is commented out is read as null.
    return {key: value for key, value in values.items() if value is not None or not _is_section(key)}


def _is_section(key: str) -> bool:
    return _section_of(ServerConfig.model_fields[key].annotation) is not None


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings in `TWINMESH_…`: upper case, `__` between the levels of a nested key. Raises ConfigError."""
    values: dict[str, Any] = {}
    for name in sorted(environment):
        text = environment[name]
        if not name.startswith(ENVIRONMENT_PREFIX) or name in RESERVED:
            continue
        if _SERVICE_LINK.search(name) or _SERVICE_URL.match(text):
            continue
        parts = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        field = _field_at(parts)
        if field is None:
            raise ConfigError(_unknown(name, [variable_name(path) for path, _ in leaves()]))
        _put(values, parts, _parse_text(text, field, name))
    check_keys(values, "the environment")
    return values


def from_assignments(assignments: list[str]) -> dict[str, Any]:
    """The settings in `--set key.path=value`, later ones over earlier ones. Raises ConfigError."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError("--set takes key.path=value")
        parts = key.strip().split(".")
        if parts[0] in SECRET_KEYS:
            raise ConfigError(
                f"--set {parts[0]}: a key on the command line can be seen by every user of this machine; "
                f"use {variable_name(parts[0])} or api_key_file"
            )
        field = _field_at(parts)
        if field is None:
            raise ConfigError(f"--set: {_unknown(key, [path for path, _ in leaves()])}")
        _put(values, parts, _parse_text(text, field, f"--set {key}"))
    check_keys(values, "--set")
    return values


def variable_name(path: str) -> str:
    """The environment variable of a dotted key."""
    return ENVIRONMENT_PREFIX + path.upper().replace(".", "__")


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: mappings key by key, everything else as a whole."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def leaves(section: type[BaseModel] = ServerConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, pydantic field) that is not a section."""
    for name, field in section.model_fields.items():
        if (nested := _section_of(field.annotation)) is not None:
            yield from leaves(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def check_keys(
    values: Mapping[str, Any], origin: str, section: type[BaseModel] = ServerConfig, prefix: str = ""
) -> None:
    """Raise ConfigError for the first key that does not exist."""
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None:
            known = [prefix + name for name in section.model_fields]
            raise ConfigError(f"{origin}: {_unknown(prefix + key, known + [path for path, _ in leaves()])}")
        nested = _section_of(field.annotation)
        if nested is not None and isinstance(value, Mapping):
            check_keys(value, origin, nested, f"{prefix}{key}.")
        if get_origin(field.annotation) is list and isinstance(value, list):
            _check_items(value, origin, field.annotation, prefix + key)


def _check_items(values: list[Any], origin: str, annotation: Any, path: str) -> None:
    """The same for a list of sections."""
    section = _section_of(get_args(annotation)[0])
    if section is None:
        return
    for index, item in enumerate(values):
        for key in item if isinstance(item, Mapping) else ():
            if key not in section.model_fields:
                known = [f"{path}.{index}.{name}" for name in section.model_fields]
                raise ConfigError(f"{origin}: {_unknown(f'{path}.{index}.{key}', known)}")


def _unknown(key: str, known: list[str]) -> str:
    """The message for an unknown key: the nearest by its whole path, or one of the same last name elsewhere."""
    shown = key if key.isprintable() and len(key) <= 100 else "(not printable)"
    separator = "__" if key.startswith(ENVIRONMENT_PREFIX) else "."

    def parts_of(path: str) -> list[str]:
        return path.removeprefix(ENVIRONMENT_PREFIX).lower().split(separator)

    def likeness(path: str) -> float:
        """Of the whole path, or of its last name, which may have been put at the wrong level."""
        given, candidate = parts_of(key), parts_of(path)
        whole = difflib.SequenceMatcher(None, ".".join(given), ".".join(candidate)).ratio()
        return max(whole, difflib.SequenceMatcher(None, given[-1], candidate[-1]).ratio())

    nearest = max(known, key=likeness)
    if likeness(nearest) < LEAST_LIKENESS:
        nearest = ""
    hint = f"; did you mean {nearest!r}?" if nearest else "; --help lists the keys"
    return f"unknown key {shown!r}{hint}"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _field_at(parts: list[str]) -> Any:
    """The annotation at a path of names, or None if there is nothing."""
    section: type[BaseModel] | None = ServerConfig
    annotation: Any = None
    for part in parts:
        field = section.model_fields.get(part) if section is not None else None
        if field is None:
            return None
        annotation = field.annotation
        section = _section_of(annotation)
    return annotation


def _put(values: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        below = values.get(part)
        values[part] = below if isinstance(below, dict) else {}
        values = values[part]
    values[parts[-1]] = value


def _parse_text(text: str, annotation: Any, origin: str) -> Any:
    """Text of a variable or flag as a value: as it stands where text is wanted, a comma-separated list, or YAML."""
    kinds = set(get_args(annotation)) or {annotation}
    stripped = text.strip()
    if NoneType in kinds and stripped in ("", "null", "~"):
        return None
    if annotation in (list[str], list[SecretStr]):
        return _list_of_texts(stripped, origin)
    wants_text = annotation is str or str in kinds or any(isinstance(kind, str) for kind in kinds)
    if wants_text and not stripped.startswith(("[", "{")):
        return text
    try:
        return parse_yaml(text, origin)
    except ConfigError:
        raise ConfigError(f"{origin}: not a value that can be read") from None


def _list_of_texts(text: str, origin: str) -> Any:
    if text.startswith("["):
        try:
            return parse_yaml(text, origin)
        except ConfigError:
            raise ConfigError(f"{origin}: not a list that can be read") from None
    return [part.strip() for part in text.split(",") if part.strip()]
