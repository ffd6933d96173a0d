"""A table before it is text or HTML, and how numbers and names are written in either. Used by `table.py` and pages."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.reports.statistics import Interval

BLANK = "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of a table. The first `num_names` columns are names, aligned left; the others numbers, aligned right."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int = 1
    notes: tuple[str, ...] = field(default=())


def fixed(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    """A number with so many decimals, never a negative zero; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return BLANK
    text = f"{value * scale:.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def with_interval(interval: Interval | None, scale: float = 1.0, digits: int = 1, star: bool = False) -> str:
    """`mean ± half width`, and a star if asked for; the mean alone of a single value."""
    if interval is None:
        return BLANK
    text = fixed(interval.mean, scale, digits)
    if interval.half_width is not None:
        text += f" ± {fixed(interval.half_width, scale, digits)}"
    return f"{text}*" if star else text


def printable(text: str) -> str:
    """Names come from clients: whatever moves a cursor, turns text around or is no character becomes U+FFFD."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def as_text(grid: Grid) -> str:
    """Aligned columns under a rule, ending in a newline."""
    lines = [tuple(map(printable, line)) for line in (grid.headings, *grid.rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    heading, *rows = (_line(line, widths, grid.num_names) for line in lines)
    rule = "  ".join("─" * width for width in widths)
    return "\n".join((printable(grid.title), heading, rule, *rows, *map(printable, grid.notes))) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int], num_names: int) -> str:
    padded = []
    for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        blanks = " " * (width - _width(cell))
        padded.append(cell + blanks if index < num_names else blanks + cell)
    return "  ".join(padded).rstrip()


def _width(text: str) -> int:
    """Columns of a terminal: letters of East Asia take two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(letter) in ("W", "F") for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)
