"""Cost models by name and from files: `load_cost` is what a command line or a configuration calls.

A file holds one JSON object with `kind` and `version`; everything in it is checked, and an unknown key is an error. A
spec is a short text for the models that have few numbers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from scheduler.costs.constant import ConstantCost
from scheduler.costs.fields import Fields
from scheduler.costs.fitted import FittedCost, Program, SecondsPer
from scheduler.costs.roofline import Machine, ModelShape, RooflineCost, preset_machines, preset_models
from scheduler.errors import ConfigError

VERSION = 1
SPECS = "constant:SECONDS[,SECONDS_PER_TOKEN][,idle=SECONDS] or roofline:MODEL@MACHINE[,tp=N][,overhead=SECONDS]…"

type StoredCost = ConstantCost | RooflineCost | FittedCost


def load_cost(path_or_spec: str | Path) -> StoredCost:
    """A cost model from a JSON file, or from a spec that begins with `constant:` or `roofline:`.

    `constant:0.02`, `constant:0.02,0.0001`, `constant:0.02,idle=0.005`;
    `roofline:llama-3-8b@h200`, `roofline:llama-3-70b@h200,tp=8`, with further options `overhead` and `idle` (seconds),
    `flops_efficiency`, `bandwidth_efficiency` (shares), `weight_bytes`, `kv_bytes` (bytes of one weight or element).

    Raises ConfigError that names the file or the spec.
    """
    text = str(path_or_spec)
    kind, colon, rest = text.partition(":")
    if colon and kind in ("constant", "roofline"):
        try:
            return _constant_of(rest) if kind == "constant" else _roofline_of(rest)
        except ConfigError as error:
            raise ConfigError(f"cost {text!r}: {error}") from None
    try:
        content = Path(path_or_spec).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cost {text!r}: {error.strerror}; neither a file nor {SPECS}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{text}: not UTF-8 text") from None
    return parse_cost(content, text)


def save_cost(path: str | Path, cost: StoredCost) -> None:
    """Write a file that `load_cost` reads. Blocks; replaces a file that is there; raises OSError."""
    Path(path).write_text(format_cost(cost), encoding="utf-8")


def format_cost(cost: StoredCost) -> str:
    """A cost model as JSON text."""
    return json.dumps(_document(cost), indent=1) + "\n"


def parse_cost(text: str, where: str = "cost") -> StoredCost:
    """The inverse of `format_cost`. Raises ConfigError whose message begins with `where`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    fields = Fields(where, value)
    kind, version = fields.text("kind"), fields.integer("version")
    readers: dict[str, Callable[[Fields], StoredCost]] = {
        "constant": _read_constant,
        "roofline": _read_roofline,
        "fitted": _read_fitted,
    }
    if kind not in readers:
        raise ConfigError(f"{where}: kind is {kind!r}; it must be one of {', '.join(readers)}")
    if version != VERSION:
        raise ConfigError(f"{where}: version is {version}; this program reads version {VERSION}")
    try:
        return readers[kind](fields)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(f"{where}: ") else f"{where}: {message}") from None


def _document(cost: StoredCost) -> dict[str, object]:
    if isinstance(cost, ConstantCost):
        return {"kind": "constant", "version": VERSION, **asdict(cost)}
    if isinstance(cost, RooflineCost):
        return {
            "kind": "roofline",
            "version": VERSION,
            "model": asdict(cost.model),
            "machine": asdict(cost.machine),
            "tensor_parallel": cost.tensor_parallel,
            "overhead_seconds": cost.overhead_seconds,
            "idle_seconds": cost.idle_seconds,
        }
    return {
        "kind": "fitted",
        "version": VERSION,
        "seconds_per": asdict(cost.seconds_per),
        "idle_seconds": cost.idle_seconds,
        "least_seconds": cost.least_seconds,
        "programs": [asdict(program) for program in cost.programs],
    }


def _read_constant(fields: Fields) -> ConstantCost:
    step, token = fields.number("seconds_per_step"), fields.number("seconds_per_token")
    idle = fields.number("idle_seconds")
    fields.finish()
    return ConstantCost(step, token, idle)


def _read_roofline(fields: Fields) -> RooflineCost:
    model, machine = _read_model(fields.inner("model")), _read_machine(fields.inner("machine"))
    degree = fields.integer("tensor_parallel")
    overhead, idle = fields.number("overhead_seconds"), fields.number("idle_seconds")
    fields.finish()
    return RooflineCost(model, machine, degree, overhead, idle)


def _read_model(fields: Fields) -> ModelShape:
    model = ModelShape(
        name=fields.text("name"),
        num_layers=fields.integer("num_layers"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_heads"),
        num_kv_heads=fields.integer("num_kv_heads"),
        head_dim=fields.integer("head_dim"),
        ffn_size=fields.integer("ffn_size"),
        vocab_size=fields.integer("vocab_size"),
        bytes_per_weight=fields.number("bytes_per_weight"),
        bytes_per_kv_element=fields.number("bytes_per_kv_element"),
        num_experts=fields.integer("num_experts"),
        num_experts_per_token=fields.integer("num_experts_per_token"),
    )
    fields.finish()
    return model


def _read_machine(fields: Fields) -> Machine:
    machine = Machine(
        name=fields.text("name"),
        flops=fields.number("flops"),
        bandwidth=fields.number("bandwidth"),
        flops_efficiency=fields.number("flops_efficiency"),
        bandwidth_efficiency=fields.number("bandwidth_efficiency"),
    )
    fields.finish()
    return machine


def _read_fitted(fields: Fields) -> FittedCost:
    inner = fields.inner("seconds_per")
    names = ("step", "padded_token", "padded_row", "kv_token", "attended", "row")
    seconds_per = SecondsPer(*(inner.number(name) for name in names))
    inner.finish()
    programs = tuple(map(_read_program, fields.objects("programs")))
    idle, least = fields.number("idle_seconds"), fields.number("least_seconds")
    fields.finish()
    return FittedCost(seconds_per, programs, idle, least)


def _read_program(fields: Fields) -> Program:
    program = Program(
        num_tokens=fields.integer("num_tokens"),
        num_rows=fields.integer("num_rows"),
        single_token_rows=fields.flag("single_token_rows"),
        extra_seconds=fields.number("extra_seconds"),
        num_samples=fields.integer("num_samples"),
    )
    fields.finish()
    return program


def _constant_of(text: str) -> ConstantCost:
    plain = [part for part in text.split(",") if "=" not in part]
    options = _options(text.split(",")[len(plain) :], ("idle",))
    if len(plain) > 2:
        raise ConfigError("at most two numbers are wanted: seconds a step and seconds a token")
    step, token = (*(_number("a cost", part) for part in plain), 0.0)[:2] if plain else (0.0, 0.0)
    return ConstantCost(step, token, options.get("idle", 0.0))


def _roofline_of(text: str) -> RooflineCost:
    pair, *parts = text.split(",")
    model_name, at, machine_name = pair.partition("@")
    if not at:
        raise ConfigError("a roofline is MODEL@MACHINE")
    names = ("tp", "overhead", "idle", "flops_efficiency", "bandwidth_efficiency", "weight_bytes", "kv_bytes")
    options = _options(parts, names)
    model = _preset("model", model_name, {model.name: model for model in preset_models()})
    machine = _preset("machine", machine_name, {machine.name: machine for machine in preset_machines()})
    degree = options.get("tp", 1.0)
    if degree != int(degree):
        raise ConfigError(f"tp is {degree}; it must be an integer")
    model = replace(
        model,
        bytes_per_weight=options.get("weight_bytes", model.bytes_per_weight),
        bytes_per_kv_element=options.get("kv_bytes", model.bytes_per_kv_element),
    )
    machine = replace(
        machine,
        flops_efficiency=options.get("flops_efficiency", machine.flops_efficiency),
        bandwidth_efficiency=options.get("bandwidth_efficiency", machine.bandwidth_efficiency),
    )
    return RooflineCost(model, machine, int(degree), options.get("overhead", 0.0), options.get("idle", 0.0))


def _preset[T](what: str, name: str, presets: Mapping[str, T]) -> T:
    if name not in presets:
        raise ConfigError(f"unknown {what} {name!r}; known are {', '.join(presets)}")
    return presets[name]


def _options(parts: Iterable[str], names: tuple[str, ...]) -> dict[str, float]:
    options: dict[str, float] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in names:
            raise ConfigError(f"unknown option {part!r}; known are {', '.join(names)}")
        if name in options:
            raise ConfigError(f"{name} is given twice")
        options[name] = _number(name, value)
    return options


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be a number") from None
    if value in (float("inf"), float("-inf")) or value != value:
        raise ConfigError(f"{name} is {text!r}; it must be finite")
    return value
