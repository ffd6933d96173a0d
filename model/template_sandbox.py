"""Jinja for chat templates, fenced in: no attribute that leads out, and bounds on steps, time and sizes.

A template may come with a request. `jinja2.sandbox` keeps it from reaching Python's insides; what is added here keeps
it from running or growing without end: every loop turn, call and filter costs a step, and every text, list or dict made
on the way has a greatest size. What would grow far beyond its inputs is refused before it is made. Called by
`model/chat_template.py`.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

_LONG_WIDTH = re.compile(r"\d{5,}|\*|\{[^{}]*\{")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on one rendering.

    Attributes:
        steps: loop turns, calls, filters and pieces of output. secs: of time, looked at when a step begins.
        characters: of any text, and of the output. items: of any list or dict, those within it included (64 characters
            of text count as an item). integer_bits: of a product or power.
    """

    steps: int = 1_000_000
    secs: float = 5.0
    characters: int = 32 << 20
    items: int = 1 << 20
    integer_bits: int = 4096


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training (transformers); here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's, whose text does not spell out what it holds."""

    def __repr__(self) -> str:
        return "<namespace>"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One environment for one rendering; holds what is left of its limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, limits: TemplateLimits | None = None):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        self.limits = limits or TemplateLimits()
        self.steps_left = self.limits.steps
        self.deadline = time.monotonic() + self.limits.secs
        self._weights: dict[int, tuple[Any, int]] = {}
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["_turns"] = self._turns
        self.filters["_sized"] = self.sized
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _now

    def step(self) -> None:
        """One more loop turn, call or filter. Raises SecurityError when it is one too many."""
        self.steps_left -= 1
        if self.steps_left < 0 or time.monotonic() > self.deadline:
            raise SecurityError("the template runs for too long")

    def sized(self, value: Any) -> Any:
        """`value`, if it is no larger than allowed."""
        if isinstance(value, str):
            self._allow(len(value), self.limits.characters)
        else:
            self._allow(self._weight(value), self.limits.items)
        return value

    def _weight(self, value: Any) -> int:
        """Items in a value and in what it holds. Remembered: in here nothing changes a list or dict once it is made."""
        if isinstance(value, str):
            return 1 + len(value) // 64
        if not isinstance(value, list | tuple | dict):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            held = [*value, *value.values()] if isinstance(value, dict) else value
            known = value, 1 + sum(map(self._weight, held))
            self._weights[id(value)] = known  # with the value, so that its id is not given to another
        return known[1]

    def _allow(self, size: int, most: int) -> None:
        if size > most:
            raise SecurityError(f"the template makes something too large (more than {most})")

    def _turns(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.step()
            yield item

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps Jinja's mark of what the first argument is
        def bounded(*args: Any, **options: Any) -> Any:
            self.step()
            given = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self._check_arguments(name, given[0] if given else None, given[1:], options)
            return self.sized(function(*args, **options))

        return bounded

    def _check_arguments(self, name: str, subject: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Refuse what would grow far beyond its inputs: widths, replacements, joins, formats."""
        given = (*args, *options.values())
        numbers = [abs(value) for value in given if isinstance(value, int)]
        self._allow(max(numbers, default=0), self.limits.items)
        if name in ("indent", "expandtabs", "wordwrap", "tojson"):
            most = max([*numbers, *(len(value) for value in given if isinstance(value, str))], default=0)
            self._allow(
                (len(subject) if isinstance(subject, str) else self._weight(subject)) * most, self.limits.characters
            )
        if name == "translate" or (name == "sum" and any(isinstance(value, list | str) for value in given)):
            raise SecurityError(f"{name} is not available like this")
        if name == "replace" and isinstance(subject, str) and len(args) >= 2:
            self._allow(len(subject) + subject.count(str(args[0])) * len(str(args[1])), self.limits.characters)
        elif name == "join":
            separator, parts = (subject, args[0]) if isinstance(subject, str) and args else (args[:1], subject)
            count = len(parts) if isinstance(parts, list | tuple | str | dict) else self.limits.items
            self._allow(count * max(1, len(str(separator))), self.limits.characters)
        elif name in ("format", "format_map") and _LONG_WIDTH.search(str(subject)):
            raise SecurityError("format: the width is too large")

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        """Every call in a template comes here: macros, methods and functions."""
        self.step()
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        self._check_arguments(getattr(function, "__name__", "call"), owner, args, options)
        return self.sized(super().call(context, function, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make large things out of small ones."""
        self.step()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    size = len(value) if isinstance(value, str) else self._weight(value)
                    self._allow(size * max(times, 0), self.limits.items)
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            self._allow(bits, self.limits.integer_bits)
        if operator == "%" and isinstance(left, str) and _LONG_WIDTH.search(left):
            raise SecurityError("%: the width is too large")
        return self.sized(super().call_binop(context, operator, left, right))


def compile_template(source: str) -> CodeType:
    """Code that `render` runs. Raises jinja2.TemplateError, and others for sources that Python cannot compile."""
    environment = TemplateSandbox()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, "_turns", loop.lineno)
    for block in tree.find_all(nodes.AssignBlock):
        block.filter = _filtered(block.filter, "_sized", block.lineno)
    _bound_what_grows(tree)
    return environment.compile(tree)


def render(code: CodeType, variables: dict[str, Any], limits: TemplateLimits) -> str:
    """Run a compiled template. Raises jinja2.TemplateError for its own complaints, anything for its failures."""
    environment = TemplateSandbox(limits)
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        environment.step()
        size += len(piece)
        if size > limits.characters:
            raise SecurityError(f"the template writes too much (more than {limits.characters} characters)")
        pieces.append(piece)
    return "".join(pieces)


def _filtered(node: Any, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _grows(node: Any) -> bool:
    return isinstance(node, nodes.Concat | nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )


def _bound_what_grows(node: nodes.Node) -> None:
    """Put the size check around every `~`, list, tuple and dict below `node`."""
    for field, value in list(node.iter_fields()):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _bound_what_grows(child)
        bounded = [_filtered(child, "_sized", child.lineno) if _grows(child) else child for child in children]
        setattr(node, field, bounded if isinstance(value, list) else bounded[0])


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
