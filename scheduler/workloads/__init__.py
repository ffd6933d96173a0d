"""Where simulated requests come from: kinds by name, each deterministic by its seed, and traces.

`make_workload` builds one by name from options as they are written on a command line. All kinds draw their requests
with `scheduler/workloads/requests.py` and differ in when these come.
"""

import inspect
from collections.abc import Callable
from difflib import get_close_matches

from scheduler.errors import ConfigError
from scheduler.simulation.records import Workload
from scheduler.workloads.closed_loop import ClosedLoop
from scheduler.workloads.open_loop import OpenLoop
from scheduler.workloads.requests import RequestShape, RequestSource, request_shape
from scheduler.workloads.sessions import Sessions
from scheduler.workloads.traces import TraceWorkload, read_trace, write_trace

WORKLOADS = {
    "poisson": "independent arrivals",
    "gamma": "bursts (option cv, 2)",
    "closed": "clients that send again when answered (options num_clients, think_secs, stagger_secs)",
    "sessions": "conversations whose turns share their history (options turns, think_secs)",
}
_SHAPE_OPTIONS = tuple(inspect.signature(request_shape).parameters)
_KIND_OPTIONS = {
    "poisson": (),
    "gamma": ("cv",),
    "closed": ("num_clients", "think_secs", "stagger_secs"),
    "sessions": ("turns", "think_secs"),
}


def make_workload(name: str, *, rate: float, num_requests: int, seed: int, **options: object) -> Workload:
    """A workload of `num_requests` requests at `rate` a second on average (a closed loop finds its own rate).

    Options of all kinds are those of `request_shape`: input_lengths, output_lengths, priorities, tenants, slack,
    num_prefixes, prefix_length; and those that `WORKLOADS` names.

    Raises:
        ConfigError: for an unknown name or option, or a value that cannot be read.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; {_known(name, tuple(WORKLOADS))}")
    allowed = (*_SHAPE_OPTIONS, *_KIND_OPTIONS[name])
    for option in options:
        if option not in allowed:
            raise ConfigError(f"workload {name!r} has no option {option!r}; {_known(option, allowed)}")
    shape_options = {option: value for option, value in options.items() if option in _SHAPE_OPTIONS}
    shape: RequestShape = _call(request_shape, shape_options)
    kind_options = {option: value for option, value in options.items() if option not in _SHAPE_OPTIONS}
    if name == "closed":
        return _call(ClosedLoop, {"shape": shape, "num_requests": num_requests, "seed": seed, **kind_options})
    common = {"shape": shape, "rate": rate, "num_requests": num_requests, "seed": seed}
    if name == "sessions":
        return _call(Sessions, {**common, **kind_options})
    defaults: dict[str, object] = {"cv": 2.0} if name == "gamma" else {}
    return _call(OpenLoop, {**common, **defaults, **kind_options})


def _call[Result](make: Callable[..., Result], options: dict[str, object]) -> Result:
    return make(**options)


def _known(name: str, names: tuple[str, ...]) -> str:
    close = get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


__all__ = [
    "WORKLOADS",
    "RequestShape",
    "RequestSource",
    "TraceWorkload",
    "make_workload",
    "read_trace",
    "request_shape",
    "write_trace",
]
