"""`python -m scheduler.conformance NAME`: tries a policy and prints the report.

Exits with 1 if a property failed, with 2 for a name, option or value that is wrong.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from scheduler.config import SchedulerConfig
from scheduler.conformance import PROPERTIES, ConformanceError, check_policy
from scheduler.errors import ConfigError
from scheduler.policies import CAPACITIES, policy_names


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser("python -m scheduler.conformance", description="Try a policy on random scripts.")
    parser.add_argument("name", help=f"a bundled or registered policy: {', '.join(policy_names())}")
    parser.add_argument("--options", type=json.loads, default={}, help='the policy\'s own, as JSON: {"quantum": 32}')
    parser.add_argument("--capacity", default="known_tokens", choices=list(CAPACITIES))
    parser.add_argument("--aging", type=float, default=SchedulerConfig().aging_per_second, help="aging_per_second")
    parser.add_argument("--examples", type=int, default=100, help="scripts for each property")
    parser.add_argument("--seed", type=int, default=None, help="of the draws; without one they are always the same")
    parser.add_argument("--skip", action="append", default=[], choices=list(PROPERTIES), help="may be given again")
    chosen = parser.parse_args(arguments)
    try:
        if not isinstance(chosen.options, dict):
            raise ConfigError(f"--options must be a JSON object, not {chosen.options!r}")
        config = SchedulerConfig(
            policy_options=chosen.options, capacity_policy=chosen.capacity, aging_per_second=chosen.aging
        )
        print(
            check_policy(chosen.name, config=config, max_examples=chosen.examples, seed=chosen.seed, skip=chosen.skip)
        )
    except ConformanceError as error:
        print(error.report)
        return 1
    except (ConfigError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
