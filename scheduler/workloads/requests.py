"""The body of a workload's requests, apart from when they come: lengths, priority, tenant, shared prefix.

Every kind of workload draws its requests here. Each property has a random stream of its own, so that two runs with
different rates, or one option changed, still agree in all the others (common random numbers).
"""

from dataclasses import dataclass
from random import Random

from scheduler.errors import ConfigError
from scheduler.policies.options import non_negative, whole
from scheduler.simulation.records import Arrival
from scheduler.workloads.labels import Shares, parse_priorities, parse_shares
from scheduler.workloads.lengths import MOST, Lengths, parse_lengths

BLOCK_SIZE = 16
MAX_PREFIXES = 1 << 16
# Ids of shared prefixes lie apart from each other and, below `PREFIX_IDS_END`, from those of everything else.
_PREFIX_SPAN = MOST // BLOCK_SIZE
PREFIX_IDS_END = MAX_PREFIXES * _PREFIX_SPAN


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What requests are like.

    Attributes:
        input_lengths, output_lengths: token counts. priorities, tenants: shares; no tenants: nobody in particular.
        slack: a client allows so many times the tokens that its request uses (1: exactly as many).
        num_prefixes, prefix_length: each request begins with one of so many shared prefixes of so many tokens (added to
            its own prompt), the first the most common (Zipf); 0 prefixes: nothing is shared.
    """

    input_lengths: Lengths
    output_lengths: Lengths
    priorities: Shares
    tenants: Shares | None
    slack: float
    num_prefixes: int
    prefix_length: int


def request_shape(
    input_lengths: object = "lognormal:256,0.8,4096",
    output_lengths: object = "lognormal:64,0.8,1024",
    priorities: object = "1.0:0.2,0.5:0.6,0.0:0.2",
    tenants: object = "a:0.6,b:0.3,c:0.1",
    slack: float = 1.0,
    num_prefixes: int = 0,
    prefix_length: int = 256,
) -> RequestShape:
    """From options as they are written; the defaults are varied enough to tell policies apart. Raises ConfigError.

    `tenants` may be None.
    """
    if non_negative("slack", slack) < 1:
        raise ConfigError(f"slack must be at least 1, not {slack}")
    if whole("num_prefixes", num_prefixes, 0) > MAX_PREFIXES:
        raise ConfigError(f"num_prefixes must be at most {MAX_PREFIXES}, not {num_prefixes}")
    if whole("prefix_length", prefix_length) > MOST:
        raise ConfigError(f"prefix_length must be at most {MOST}, not {prefix_length}")
    return RequestShape(
        parse_lengths("input_lengths", input_lengths),
        parse_lengths("output_lengths", output_lengths),
        parse_priorities("priorities", priorities),
        None if tenants is None else parse_shares("tenants", tenants),
        slack,
        num_prefixes,
        prefix_length,
    )


class RequestSource:
    """Draws requests one after the other. The sequence depends on the seed alone."""

    def __init__(self, shape: RequestShape, seed: int | str):
        self._shape = shape
        self._streams = {name: Random(f"{seed}/{name}") for name in ("input", "output", "priority", "tenant", "prefix")}
        weights = {str(index): 1.0 / (index + 1) for index in range(shape.num_prefixes)}
        self._prefixes = Shares(weights) if weights else None
        self._count = 0

    def next(self, time: float, session: str | None = None) -> Arrival:
        """The next request, arriving at `time`."""
        shape, streams = self._shape, self._streams
        output_length = shape.output_lengths(streams["output"])
        input_length = shape.input_lengths(streams["input"])
        hash_ids: tuple[int, ...] = ()
        if self._prefixes is not None:
            prefix = int(self._prefixes.draw(streams["prefix"]))
            num_blocks = shape.prefix_length // BLOCK_SIZE
            hash_ids = tuple(range(prefix * _PREFIX_SPAN, prefix * _PREFIX_SPAN + num_blocks))
            input_length += shape.prefix_length
        self._count += 1
        return Arrival(
            f"r{self._count - 1}",
            time,
            input_length,
            output_length,
            hash_ids,
            BLOCK_SIZE,
            max(output_length, round(shape.slack * output_length)),
            float(shape.priorities.draw(streams["priority"])),
            None if shape.tenants is None else shape.tenants.draw(streams["tenant"]),
            session,
        )
