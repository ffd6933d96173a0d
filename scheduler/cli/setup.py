"""What the commands that simulate have in common: their options, and what is built from them.

Everything that a run depends on is in one frozen, picklable `Setup`, so that runs can be done in other processes.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scheduler.cli.policies import PolicyChoice
from scheduler.config import SchedulerConfig
from scheduler.costs import ConstantCost, RooflineCost, StoredCost, load_cost
from scheduler.errors import ConfigError
from scheduler.policies import CAPACITIES
from scheduler.reports import Objectives
from scheduler.simulation.records import Arrival, RunResult, Workload
from scheduler.simulation.routers import ROUTER_NAMES
from scheduler.simulation.simulator import Predictor, Simulator
from scheduler.simulation.topology import Disaggregated, Link, Pool, Topology, Unified

DEFAULT_COST = "roofline:llama-3-8b@h200"
KV_BYTES_PER_TOKEN = 131072.0
GIGABYTE = 1e9


@dataclass(frozen=True)
class Setup:
    """The engines of a run, without workload, policy and seed.

    Attributes:
        config: the scheduler's limits. cost: of a step. num_replicas, router: of a unified pool.
        num_context, num_generation, link: of a disaggregated topology; 0 context engines mean unified.
        sigma: error of the length predictor (standard deviation of the logarithm); None: nobody predicts.
        pipelined: whether a step is planned before the results of the one before are known.
    """

    config: SchedulerConfig
    cost: StoredCost
    num_replicas: int = 1
    router: str = "round_robin"
    num_context: int = 0
    num_generation: int = 0
    link: Link | None = None
    sigma: float | None = 0.0
    pipelined: bool = True
    objectives: Objectives = field(default_factory=Objectives)

    def topology(self, policy: PolicyChoice) -> Topology:
        """The engines under a policy."""
        pool = Pool(self.cost, policy.configured(self.config), max(self.num_replicas, 1), self.router)
        if not self.num_context or self.link is None:
            return Unified(pool)
        return Disaggregated(
            replace(pool, num_replicas=self.num_context), replace(pool, num_replicas=self.num_generation), self.link
        )

    def run(
        self,
        policy: PolicyChoice,
        workload: Workload,
        *,
        seed: int,
        record_steps: bool = False,
        on_progress: Callable[[int, int], None] = lambda ended, arrived: None,
    ) -> RunResult:
        """Simulate one run."""
        simulator = Simulator(
            self.topology(policy),
            workload,
            predictor=self._predictor(seed),
            pipelined=self.pipelined,
            record_steps=record_steps,
        )
        result = simulator.run(on_progress)
        result.labels = {"policy": policy.text}
        return result

    def describe(self) -> str:
        """The engines on one line, for people."""
        if self.link is not None:
            engines = f"{self.num_context} context and {self.num_generation} generation engines"
        else:
            engines = "1 engine" if self.num_replicas == 1 else f"{self.num_replicas} engines"
        limits, each = self.config, "" if self.link is None and self.num_replicas == 1 else " each"
        return (
            f"{engines} of {limits.max_num_seqs} slots and {limits.num_pages} pages of {limits.page_size} tokens{each}"
            f"; {describe_cost(self.cost)}"
        )

    def _predictor(self, seed: int) -> Predictor:
        sigma = self.sigma
        if sigma is None:
            return lambda arrival: None
        if sigma == 0.0:
            return lambda arrival: float(arrival.output_length)

        def predict(arrival: Arrival) -> float:
            # By request, so that the guess does not depend on the order in which policies ask.
            error = random.Random(f"{seed}/{arrival.request_id}").lognormvariate(0.0, sigma)
            return arrival.output_length * error

        return predict


def describe_cost(cost: StoredCost) -> str:
    """What decides how long a step takes, in a few words."""
    if isinstance(cost, RooflineCost):
        degree = "" if cost.tensor_parallel == 1 else f" × {cost.tensor_parallel}"
        return f"steps as long as the roofline of {cost.model.name} on {cost.machine.name}{degree} says"
    if isinstance(cost, ConstantCost):
        token = f" and {cost.seconds_per_token * 1e3:g} ms a token" if cost.seconds_per_token else ""
        return f"steps of {cost.seconds_per_step * 1e3:g} ms{token}"
    return "steps as long as those of a recording"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the engines and of the objectives."""
    limits = SchedulerConfig()
    engines = parser.add_argument_group("engines")
    engines.add_argument("--cost", default=DEFAULT_COST, help="file of `fit`, or constant:… or roofline:MODEL@MACHINE")
    engines.add_argument("--max-num-seqs", type=int, default=limits.max_num_seqs, help="slots")
    engines.add_argument("--max-num-batched-tokens", type=int, default=limits.max_num_batched_tokens, help="of a step")
    engines.add_argument("--max-model-len", type=int, default=8192, help="tokens of the context")
    engines.add_argument("--max-queue-size", type=int, default=10**6, help="waiting requests before one is refused")
    engines.add_argument("--num-pages", type=int, default=limits.num_pages, help="KV pages of an engine")
    engines.add_argument("--page-size", type=int, default=limits.page_size, help="tokens of a page")
    engines.add_argument("--no-prefix-reuse", action="store_true", help="no prefix cache")
    engines.add_argument(
        "--capacity-policy", choices=tuple(CAPACITIES), default=limits.capacity_policy, help="admission"
    )
    engines.add_argument("--no-preempt-running", action="store_true", help="nobody makes room for a newcomer")
    engines.add_argument("--aging-per-second", type=float, default=limits.aging_per_second, help="of `priority`")
    engines.add_argument("--predictor", default="exact", help="of lengths: none, exact, or noisy:SIGMA")
    engines.add_argument("--no-pipelining", action="store_true", help="plan a step when the one before has ended")
    topology = parser.add_argument_group("topology")
    topology.add_argument("--replicas", type=int, default=1, help="unified engines")
    topology.add_argument("--router", choices=ROUTER_NAMES, default="round_robin", help="of each pool")
    topology.add_argument("--context", type=int, default=0, metavar="N", help="context engines; with --generation")
    topology.add_argument("--generation", type=int, default=0, metavar="N", help="generation engines")
    topology.add_argument("--transfer-gigabytes-per-second", type=float, default=25.0, help="of a context engine")
    topology.add_argument("--transfer-latency", type=float, default=0.002, metavar="SECONDS", help="of a hand-off")
    objectives = parser.add_argument_group("objectives")
    objectives.add_argument("--ttft-objective", type=float, metavar="SECONDS", help="first token")
    objectives.add_argument(
        "--itl-objective", type=float, metavar="SECONDS", help="mean time between a request's tokens"
    )


def setup_of(options: argparse.Namespace) -> Setup:
    """What the options say. Raises ConfigError."""
    cost = load_cost(options.cost)
    if bool(options.context) != bool(options.generation):
        raise ConfigError("--context and --generation go together")
    if min(options.context, options.generation) < 0 or options.replicas < 1:
        raise ConfigError("a pool needs at least one engine")
    if options.context and options.replicas != 1:
        raise ConfigError("--replicas is of unified engines; with --context and --generation it means nothing")
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        max_queue_size=options.max_queue_size,
        num_pages=options.num_pages,
        page_size=options.page_size,
        enable_prefix_reuse=not options.no_prefix_reuse,
        capacity_policy=options.capacity_policy,
        preempt_running=not options.no_preempt_running,
        aging_per_second=options.aging_per_second,
    )
    kv_bytes = cost.kv_bytes_per_token() if isinstance(cost, RooflineCost) else KV_BYTES_PER_TOKEN
    link = Link(options.transfer_gigabytes_per_second * GIGABYTE, options.transfer_latency, kv_bytes)
    return Setup(
        config=config,
        cost=cost,
        num_replicas=options.replicas,
        router=options.router,
        num_context=options.context,
        num_generation=options.generation,
        link=link if options.context else None,
        sigma=_sigma(options.predictor),
        pipelined=not options.no_pipelining,
        objectives=Objectives(options.ttft_objective, options.itl_objective),
    )


def _sigma(text: str) -> float | None:
    if text == "none":
        return None
    if text == "exact":
        return 0.0
    kind, _, value = text.partition(":")
    try:
        sigma = float(value)
    except ValueError:
        sigma = -1.0
    if kind != "noisy" or not 0 <= sigma < 10:
        raise ConfigError(f"--predictor {text!r}: write none, exact or noisy:SIGMA, such as noisy:0.5")
    return sigma
