"""Learn a cost model from the steps that a server recorded, and print its error on steps it has not seen."""

import argparse
from pathlib import Path

from scheduler.cli.progress import ProgressBar
from scheduler.costs import fit_cost, format_report, read_samples, save_cost
from scheduler.errors import ConfigError
from scheduler.simulation.records import StepSample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "recording", nargs="+", help="a recording's folder, or its steps.jsonl; several are put together"
    )
    parser.add_argument("--output", metavar="FILE", help="write the model here, for --cost")
    parser.add_argument("--holdout", type=float, default=0.2, help="share of the steps that is kept for the test")
    parser.add_argument("--seed", type=int, default=0, help="decides which steps are kept")


def run(options: argparse.Namespace) -> None:
    """Fit, print, save. Raises ConfigError or OSError."""
    if not 0 < options.holdout < 1:
        raise ConfigError(f"--holdout must be between 0 and 1, not {options.holdout:g}")
    bar = ProgressBar("reading", len(options.recording))
    samples: list[StepSample] = []
    for done, name in enumerate(options.recording):
        samples.extend(read_samples(steps_of(name)))
        bar.update(done + 1)
    bar.close()
    report = fit_cost(samples, holdout=options.holdout, seed=options.seed)
    print(format_report(report))
    if options.output:
        save_cost(options.output, report.model)
        print(f"written to {options.output}")


def steps_of(name: str) -> Path:
    """The file of steps in a recording's folder, or the file itself."""
    path = Path(name)
    return path / "steps.jsonl" if path.is_dir() else path
