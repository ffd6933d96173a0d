"""`python -m scheduler simulate|compare|replay|fit`: see `scheduler/cli/`."""

from scheduler.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
