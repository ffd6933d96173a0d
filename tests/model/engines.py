"""Engines for tests: a tiny random model, or the default one, and a blocking way to ask them."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig
from model.decoder import param_shapes
from model.engine import Engine
from model.engine_types import EngineState
from model.mesh import param_sharding
from model.runner import Runner, RunnerConfig
from model.sampling import SamplingParams, TokenLogprobs
from scheduler import Event, FinishReason, Request, Scheduler, SchedulerConfig

DEVICE_PAGES = 40

TINY = ModelConfig(
    architecture="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position_embeddings=128,
)


def random_params(config: ModelConfig, seed: int = 0, mesh: jax.sharding.Mesh | None = None) -> dict[str, jax.Array]:
    """Float32 weights whose greedy choices are well apart."""
    rng = np.random.default_rng(seed)
    params = {}
    for path, leaf in param_shapes(config, jnp.dtype("float32")).items():
        values = rng.standard_normal(leaf.shape).astype(np.float32)
        values = 1 + 0.1 * values if path.endswith("scale") else values * (1.0 if "embed" in path else 0.35)
        params[path] = (
            jnp.asarray(values) if mesh is None else jax.device_put(values, param_sharding(path, leaf.shape, mesh))
        )
    return params


def make_engine(
    config: ModelConfig = TINY,
    params: dict[str, jax.Array] | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    vocab_size: int | None = None,
    dtype: str = "float32",
    before_step=lambda: None,
    device_pages: int = DEVICE_PAGES,
    **changes,
) -> Engine:
    """An engine that is not started; `changes` are those of `SchedulerConfig`."""
    limits = SchedulerConfig(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "num_pages": DEVICE_PAGES,
            "page_size": 4,
        }
        | changes
    )
    shapes = RunnerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        # The same for every test, so that programs are shared: a smaller pool is the scheduler's affair alone.
        num_pages=device_pages,
        page_size=limits.page_size,
        dtype=jnp.dtype(dtype),
        kv_dtype=jnp.dtype(dtype),
        vocab_size=vocab_size or config.vocab_size,
    )
    runner = Runner(shapes, config, mesh)
    runner.load(params if params is not None else random_params(config, mesh=mesh))
    return Engine(Scheduler(limits), runner, before_step=before_step)


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class Client:
    """Asks an engine and waits. Starts it when entered, stops it when left, and checks that it is at rest."""

    def __init__(self, engine: Engine, wait_for_rest: bool = True):
        """`wait_for_rest`: wait until every program is compiled, not only the first."""
        self.engine = engine
        self._wait_for_rest = wait_for_rest
        self.answers: dict[str, Answer] = {}
        self._done = threading.Condition()
        self._count = 0

    def __enter__(self) -> "Client":
        self.engine.start()
        deadline = time.monotonic() + 600
        while self.engine.error is None:
            stats = self.engine.stats()
            if stats.warm_up_is_complete or (not self._wait_for_rest and stats.state is EngineState.READY):
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(30)

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **fields) -> list[str]:
        """Queue prompts; returns their ids. `fields` go to `Request` where it has them, else to `SamplingParams`."""
        own = {"priority", "stop_token_ids", "min_new_tokens", "cache_salt", "read_prefix_cache"}
        requests = []
        for prompt in prompts:
            self._count += 1
            sampling = {"temperature": 0.0} | {key: value for key, value in fields.items() if key not in own}
            if "stop_token_ids" in fields:
                sampling["stop_token_ids"] = tuple(fields["stop_token_ids"])
            request = Request(
                f"q{self._count}",
                tuple(prompt),
                max_tokens,
                arrival_time=time.monotonic(),
                sampling=SamplingParams(**sampling),
                **{key: value for key, value in fields.items() if key in own},
            )
            self.answers[request.request_id] = Answer()
            requests.append(request)
        self.engine.submit(requests, self._take)
        return [request.request_id for request in requests]

    def wait(self, ids: Sequence[str], timeout: float = 400) -> list[Answer]:
        """Block until all have ended."""
        with self._done:
            ended = self._done.wait_for(lambda: all(self.answers[i].finish_reason for i in ids), timeout)
        assert ended, f"still open: {self.engine.stats()}"
        return [self.answers[i] for i in ids]

    def ask(self, *prompts: Sequence[int], timeout: float = 400, **fields) -> list[Answer]:
        """Submit and wait."""
        return self.wait(self.submit(prompts, **fields), timeout)

    def check_at_rest(self) -> None:
        """Nothing runs, nothing waits, no page is held."""
        deadline = time.monotonic() + 5
        while self.engine.stats().scheduler.pages_in_use and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = self.engine.stats().scheduler
        assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
        self.engine.check()

    def _take(self, event: Event) -> None:
        answer = self.answers[event.request_id]
        if event.token_id is not None:
            answer.token_ids.append(event.token_id)
        if event.logprobs is not None:
            answer.logprobs.append(event.logprobs)
        answer.prompt_logprobs.extend(event.prompt_logprobs or ())
        answer.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            with self._done:
                answer.error = event.error
                answer.finish_reason = event.finish_reason
                self._done.notify_all()
