"""One page of HTML that needs nothing else: tables, and figures drawn as SVG. No script, no network, no time stamps.

The page is well-formed as XML too. It follows the reader's light or dark scheme. Curves are drawn from fixed numbers of
points, so that its size does not grow with the number of requests.
"""

from collections.abc import Iterator, Sequence
from typing import TextIO

from scheduler.reports.comparison import Comparison, compare
from scheduler.reports.figures import MAX_POLICIES, against_load, by_class, distributions, over_time
from scheduler.reports.grid import Grid
from scheduler.reports.metrics import run_metric
from scheduler.reports.summary import Summary
from scheduler.reports.svg import text
from scheduler.reports.table import comparison_grid, run_grids
from scheduler.reports.timeline import Timeline

AGAINST_LOAD = ("ttft_p50_secs", "ttft_p99_secs", "goodput_requests_per_sec", "attainment")

STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c1c1c;--soft:#666;--rule:#ddd}
.k0{color:#0060a8}.k1{color:#c44e00}.k2{color:#00795a}.k3{color:#b0327f}
.k4{color:#7a5f00}.k5{color:#3f7fb5}.k6{color:#6b3fa0}.k7{color:#555}
@media(prefers-color-scheme:dark){
:root{--back:#161616;--text:#e8e8e8;--soft:#a5a5a5;--rule:#3a3a3a}
.k0{color:#62b5f5}.k1{color:#ff9d5c}.k2{color:#3fd3a5}.k3{color:#f28ac8}
.k4{color:#e6c84a}.k5{color:#9ecbee}.k6{color:#c09cf0}.k7{color:#bbb}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;
padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem;margin:.5rem 0}
caption{text-align:left;font-weight:600;padding:.3rem 0}
th,td{padding:.2rem .7rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
.name{text-align:left}
.note{color:var(--soft);font-size:.85rem;margin:.2rem 0}
.figures{display:flex;flex-wrap:wrap;gap:1.5rem}
figure{margin:0;width:35rem;max-width:100%}
figcaption{font-weight:600}
figure>svg{width:100%;height:auto}
svg text{fill:var(--text);font-size:12px}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}
.line{stroke:currentColor;stroke-width:2;fill:none}
.mark,.bar{fill:currentColor}.band{fill:currentColor;opacity:.18}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;margin:0;font-size:.87rem}
"""


def write_html(
    stream: TextIO,
    summaries: Sequence[Summary],
    *,
    title: str = "Simulation report",
    levels: Timeline | None = None,
    policy: str = "policy",
    load: str = "load",
    seed: str = "seed",
) -> None:
    """Write the page (encode it as UTF-8): of one run all its tables, of several the comparison by those labels.

    Args:
        stream: where to.
        summaries: the runs; with none, the page says so.
        title: its heading.
        levels: requests over time, of a run that the reader is to see in detail.
        policy: the label of what is compared. load: the label of the loads. seed: the label of runs to take means over.

    Raises:
        ValueError: two runs have the same policy, load and seed.
    """
    comparison = compare(summaries, policy=policy, load=load, seed=seed)
    for part in _page(title, summaries, comparison, levels):
        stream.write(part)


def _page(title: str, summaries: Sequence[Summary], comparison: Comparison, levels: Timeline | None) -> Iterator[str]:
    yield (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>{text(title)}</h1>\n"
    )
    if not summaries:
        yield '<p class="note">There are no runs to show.</p>\n'
    grids = run_grids(summaries[0]) if len(summaries) == 1 else (comparison_grid(comparison),) if summaries else ()
    yield from map(_table, grids)
    if len(comparison.policies) > MAX_POLICIES:
        yield f'<p class="note">Figures show the first {MAX_POLICIES} policies.</p>\n'
    chosen = [run_metric(key) for key in AGAINST_LOAD]
    yield from _section("Requests over time", over_time(levels) if levels else "")
    yield from _section("Against load (bands: 95 % confidence)", against_load(comparison, chosen))
    yield from _section("Distributions (cumulative)", distributions(comparison))
    yield from _section("Classes of priority", by_class(comparison))
    yield "</body>\n</html>\n"


def _section(heading: str, figures: str) -> Iterator[str]:
    if figures:
        yield f'<h2>{text(heading)}</h2>\n<div class="figures">\n{figures}</div>\n'


def _table(grid: Grid) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        names = [' class="name"' if index < grid.num_names else "" for index in range(len(cells))]
        filled = (f"<{tag}{name}>{text(cell)}</{tag}>" for name, cell in zip(names, cells, strict=True))
        return f"<tr>{''.join(filled)}</tr>\n"

    body = "".join(row("td", cells) for cells in grid.rows)
    notes = "".join(f'<p class="note">{text(note)}</p>\n' for note in grid.notes)
    return (
        f'<div class="wide"><table><caption>{text(grid.title)}</caption>\n<thead>{row("th", grid.headings)}</thead>\n'
        f"<tbody>{body}</tbody></table></div>\n{notes}"
    )
