"""The command line of the scheduler as an instrument: `python -m scheduler simulate|compare|replay|fit`.

Each command is a module here with `add_arguments` and `run`. They put workloads, costs, the simulator and reports
together and hold no logic of their own. Errors of the user end with one line and exit code 2.
"""

import argparse
import sys
from collections.abc import Sequence

from scheduler.cli import compare, fit, replay, simulate
from scheduler.errors import SchedulerError

COMMANDS = {"simulate": simulate, "compare": compare, "replay": replay, "fit": fit}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scheduler", description="Try scheduling policies in virtual time.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").split("\n", 1)[0]
        command = subparsers.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command].run(options)
    except SchedulerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'file'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    return 0
