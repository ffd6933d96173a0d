"""What is simulated: how many engines of which kind, and what lies between them."""

from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError
from scheduler.simulation.records import CostModel


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines that are alike.

    Attributes:
        num_replicas: how many. config: each one's scheduler. cost: each one's step times.
        router: a name of `scheduler/simulation/routers.py`.
    """

    cost: CostModel
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_replicas: int = 1
    router: str = "round_robin"

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"a pool needs at least one replica, not {self.num_replicas}")


@dataclass(frozen=True, slots=True)
class Link:
    """What moves KV from a context worker to a generation worker. Each context worker sends one request at a time.

    Attributes:
        bytes_per_second: bandwidth. latency_secs: from the last byte sent to the pages being usable.
        kv_bytes_per_token: of the model.
    """

    bytes_per_second: float
    latency_secs: float
    kv_bytes_per_token: float

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency_secs < 0 or self.kv_bytes_per_token < 0:
            raise ConfigError("a link needs a bandwidth above 0, and latency and bytes that are not negative")


@dataclass(frozen=True, slots=True)
class Unified:
    """Every engine computes prompts and outputs."""

    pool: Pool


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """Context engines compute prompts and first tokens, generation engines the rest.

    Simplified against a real hand-off: pages of the generation engine are taken when the KV has arrived, not reserved
    before, and those of the context engine are free when its step ends.
    """

    context: Pool
    generation: Pool
    link: Link


Topology = Unified | Disaggregated
