"""Line and bar charts as HTML figures with inline SVG, drawn from numbers alone. Called by `figures.py`.

Series are told apart by colour (classes `k0` to `k7`, which the page's style sheet defines for its light and dark
scheme) and by dashes. All text is escaped here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from scheduler.reports.grid import printable
from scheduler.reports.scale import Scale, tick_text

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 548, 12, 248
NUM_COLOURS = 8
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "10 4", "4 1", "12 3 3 3")
MAX_LABEL = 24


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (x, y), with a band of (x, low, high) behind it; `marked` draws a dot at each point."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A named series of bars, one for each group of the chart, with half widths of their intervals. None: no bar."""

    name: str
    values: tuple[float | None, ...]
    half_widths: tuple[float | None, ...]


def text(value: str) -> str:
    """Safe inside an element or a quoted attribute."""
    return escape(printable(value))


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    logarithmic_x: bool = False,
    x_names: Sequence[str] = (),
) -> str:
    """A figure of lines. `x_names` are written at 0, 1, 2 … instead of numbers. Empty text where there is no point."""
    xs = [x for line in lines for x, _ in line.points]
    if not xs:
        return ""
    ys = [y for line in lines for _, y in line.points]
    ys += [edge for line in lines for _, low, high in line.band for edge in (low, high)]
    across = Scale.over(xs, LEFT, RIGHT, logarithmic=logarithmic_x)
    up = Scale.over(ys, BOTTOM, TOP, from_zero=True)
    names = {float(index): name for index, name in enumerate(x_names)}
    parts = [_y_axis(up, y_label), _x_axis(across, x_label, names)]
    parts += [_band(line, index, across, up) for index, line in enumerate(lines) if line.band]
    parts += [_line(line, index, across, up) for index, line in enumerate(lines) if line.points]
    return _figure(title, parts, [line.name for line in lines])


def bar_chart(title: str, groups: Sequence[str], series: Sequence[Bars], *, y_label: str) -> str:
    """A figure of groups of bars, with whiskers for intervals. Empty text where there is no bar."""
    values = [value for bars in series for value in bars.values if value is not None]
    if not values:
        return ""
    tops = [
        value + (half or 0.0)
        for bars in series
        for value, half in zip(bars.values, bars.half_widths, strict=True)
        if value is not None
    ]
    up = Scale.over(values + tops, BOTTOM, TOP, from_zero=True)
    parts = [_y_axis(up, y_label)]
    room = (RIGHT - LEFT) / len(groups)
    width = room * 0.8 / len(series)
    for place, group in enumerate(groups):
        left = LEFT + place * room + room * 0.1
        parts.append(_text(left + room * 0.4, BOTTOM + 18, _short(group), "middle"))
        for index, bars in enumerate(series):
            parts.append(_bar(bars, place, index, left + index * width, width, up))
    return _figure(title, parts, [bars.name for bars in series])


def _figure(title: str, parts: Iterable[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<li><svg class="key" width="30" height="10" aria-hidden="true"><path class="line k{index % NUM_COLOURS}" '
        f'd="M1 5H29"{_dash(index)} /></svg> {text(name)}</li>'
        for index, name in enumerate(names)
    )
    return (
        f'<figure><figcaption>{text(title)}</figcaption><svg role="img" aria-label="{text(title)}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">\n'
        + "\n".join(part for part in parts if part)
        + f'\n</svg><ul class="legend">{legend}</ul></figure>\n'
    )


def _y_axis(up: Scale, label: str) -> str:
    parts = []
    for tick in up.ticks():
        y = up.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}" />')
        parts.append(_text(LEFT - 6, y + 4, tick_text(tick), "end"))
    middle = (TOP + BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    parts.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{text(label)}</text>')
    return "".join(parts)


def _x_axis(across: Scale, label: str, names: dict[float, str]) -> str:
    parts = [f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}" />']
    for tick in names or across.ticks():
        x = across.place(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {BOTTOM}v4" />')
        parts.append(_text(x, BOTTOM + 18, _short(names[tick]) if names else tick_text(tick), "middle"))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 40, label, "middle"))
    return "".join(parts)


def _line(line: Line, index: int, across: Scale, up: Scale) -> str:
    places = [(across.place(x), up.place(y)) for x, y in line.points]
    colour = f"k{index % NUM_COLOURS}"
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    drawn = f'<path class="line {colour}" d="M{path}"{_dash(index)} />'
    if line.marked or len(places) == 1:
        drawn += "".join(f'<circle class="mark {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3" />' for x, y in places)
    return drawn


def _band(line: Line, index: int, across: Scale, up: Scale) -> str:
    there = [f"{across.place(x):.1f} {up.place(high):.1f}" for x, _, high in line.band]
    back = [f"{across.place(x):.1f} {up.place(low):.1f}" for x, low, _ in reversed(line.band)]
    return f'<path class="band k{index % NUM_COLOURS}" d="M{"L".join(there + back)}Z" />'


def _bar(bars: Bars, place: int, index: int, left: float, width: float, up: Scale) -> str:
    value, half = bars.values[place], bars.half_widths[place]
    if value is None or not math.isfinite(value):
        return ""
    top, base = up.place(value), up.place(0.0)
    drawn = (
        f'<rect class="bar k{index % NUM_COLOURS}" x="{left + 1:.1f}" y="{top:.1f}" width="{max(width - 2, 1):.1f}" '
        f'height="{base - top:.1f}"><title>{text(bars.name)}: {tick_text(value)}</title></rect>'
    )
    if half:
        middle = left + width / 2
        drawn += f'<path class="axis" d="M{middle:.1f} {up.place(value - half):.1f}V{up.place(value + half):.1f}" />'
    return drawn


def _text(x: float, y: float, value: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(value)}</text>'


def _short(value: str) -> str:
    return value if len(value) <= MAX_LABEL else value[: MAX_LABEL - 1] + "…"


def _dash(index: int) -> str:
    dashes = DASHES[index % len(DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""
