"""The command line of the scheduler as an instrument: `python -m scheduler simulate|compare|replay|fit`.

Each command is a module here with `add_arguments` and `run`. They put workloads, costs, the simulator and reports
together and hold no logic of their own. Errors of the user end with one line and exit code 2.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Never

from scheduler.cli import compare, fit, replay, simulate
from scheduler.errors import SchedulerError

COMMANDS = {"simulate": simulate, "compare": compare, "replay": replay, "fit": fit}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong on one line, without the usage of forty options."""

    def error(self, message: str) -> Never:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults where there are some."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = _Parser(prog="python -m scheduler", description="Try scheduling policies in virtual time.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").split("\n", 1)[0]
        command = subparsers.add_parser(name, help=summary, description=summary, formatter_class=_HelpFormatter)
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except SchedulerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename or 'file'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
