"""Jinja for chat templates, fenced in: no attribute that leads out, and bounds on steps, time and sizes.

A template may come with a request. `jinja2.sandbox` keeps it from reaching Python's insides; what is added here keeps
it from running or growing without end: every loop turn, call and filter costs a step, and every text or list made on
the way has a greatest length. Called by `model/chat_template.py`.
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

_LONG_WIDTH = re.compile(r"\d{5,}|\*|\{[^{}]*\{")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on one rendering: steps, seconds, characters of any text, items of any list, bits of any integer."""

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


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One environment for one rendering; holds what is left of its limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, limits: TemplateLimits | None = None):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        self.limits = limits or TemplateLimits()
        self.steps_left = self.limits.steps
        self.deadline = time.monotonic() + self.limits.secs
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["_turns"] = self._turns
        self.filters["_sized"] = self.sized
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _now

    def step(self) -> None:
        """One more loop turn, call or filter. Raises SecurityError when it is one too many."""
        self.steps_left -= 1
        if self.steps_left < 0 or time.monotonic() > self.deadline:
            raise SecurityError("the template runs for too long")

    def sized(self, value: Any) -> Any:
        """`value`, if it is no longer than allowed."""
        if isinstance(value, str):
            self._allow(len(value), self.limits.characters)
        elif isinstance(value, list | tuple):
            self._allow(len(value), self.limits.items)
        return value

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
        for value in (*args, *options.values()):
            if isinstance(value, int) and abs(value) > self.limits.items:
                raise SecurityError(f"{name}: the number is too large")
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
                    self._allow(len(value) * max(times, 0), self.limits.items)
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
    _bound_concatenations(tree)
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


def _bound_concatenations(node: nodes.Node) -> None:
    """Put the size check around every `~` below `node`."""
    for field, value in list(node.iter_fields()):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _bound_concatenations(child)
        bounded = [_filtered(c, "_sized", c.lineno) if isinstance(c, nodes.Concat) else c for c in children]
        setattr(node, field, bounded if isinstance(value, list) else bounded[0])


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
