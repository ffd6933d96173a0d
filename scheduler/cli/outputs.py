"""Files that a report can be written to: `--csv`, `--requests-csv`, `--html`, `--perfetto`. Used by every command."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scheduler.errors import ConfigError
from scheduler.reports import (
    Objectives,
    Summary,
    timeline,
    write_html,
    write_metrics_csv,
    write_requests_csv,
    write_trace,
)
from scheduler.simulation.records import RunResult


def add_output_arguments(parser: argparse.ArgumentParser, single: bool) -> None:
    """Options that name files. `single`: of a command that shows one run in detail."""
    outputs = parser.add_argument_group("files")
    outputs.add_argument("--csv", metavar="FILE", help="every metric, a line each")
    outputs.add_argument("--html", metavar="FILE", help="a page with tables and plots, complete in itself")
    if single:
        outputs.add_argument("--requests-csv", metavar="FILE", help="every request, a line each")
        outputs.add_argument("--perfetto", metavar="FILE", help="a Chrome trace of steps and requests, for Perfetto")


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse, before anything is simulated, files that cannot be written. Raises ConfigError."""
    seen: dict[Path, str] = {}
    for name in ("csv", "html", "requests_csv", "perfetto"):
        text = getattr(options, name, None)
        if text is None:
            continue
        option, path = f"--{name.replace('_', '-')}", Path(text)
        if not text or path.is_dir():
            raise ConfigError(f"{option} {text!r} is not the name of a file")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {text}: there is no folder {path.parent}")
        if (other := seen.setdefault(path.resolve(), option)) != option:
            raise ConfigError(f"{other} and {option} are the same file, {text}")


def write_outputs(
    options: argparse.Namespace,
    title: str,
    summaries: Sequence[Summary],
    objectives: Objectives,
    detail: RunResult | None = None,
) -> None:
    """Write what was asked for and say so. Raises OSError."""
    if options.csv:
        with Path(options.csv).open("w", encoding="utf-8", newline="") as stream:
            write_metrics_csv(stream, summaries)
        print(f"metrics: {options.csv}")
    if options.html:
        with Path(options.html).open("w", encoding="utf-8") as stream:
            write_html(stream, summaries, title=title, levels=None if detail is None else timeline(detail))
        print(f"page: {options.html}")
    if detail is None:
        return
    if options.requests_csv:
        with Path(options.requests_csv).open("w", encoding="utf-8", newline="") as stream:
            write_requests_csv(stream, [detail], objectives)
        print(f"requests: {options.requests_csv}")
    if options.perfetto:
        with Path(options.perfetto).open("w", encoding="utf-8") as stream:
            write_trace(stream, detail)
        print(f"trace: {options.perfetto}")
