"""From a configuration to a model on the device and an engine around it. Called by `api/supervisor.py`, in a thread.

jax is imported in here and nowhere earlier, so that the HTTP server answers at once.
"""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from api.config import ServerConfig
from api.config_sources import ConfigError
from api.faults import ENGINE_STEP, Fault, FaultPoint, parse_action
from api.logs import get_logger
from api.server_state import ModelFacts, ServingEngine
from model.progress import Progress
from scheduler import Scheduler
from scheduler.decisions import DecisionLog

if TYPE_CHECKING:
    import jax

    from model.config import ModelConfig
    from model.engine import Engine
    from model.runner import Runner
    from model.tokenizer import Tokenizer
    from model.weights import LoadedModel

logger = get_logger("api.launch")


@dataclass(frozen=True, slots=True)
class Launched:
    """A model whose engine is built and not yet started."""

    engine: ServingEngine
    start: Callable[[], None]
    tokenizer: "Tokenizer"
    facts: ModelFacts


def build(config: ServerConfig, on_step_done: Callable[[], None], progress: Progress) -> Launched:
    """Load the model and build its engine. Blocks, for minutes at a first start.

    Raises:
        model.errors.ModelError: with a message for the operator.
        ConfigError: the configuration does not fit the model.
    """
    progress.start("starting jax", None)
    from model.default_model import default_cache_dir
    from model.mesh import make_mesh
    from model.weights import resolve_and_load

    cache_dir = default_cache_dir()
    use_compilation_cache(cache_dir / "compiled")
    mesh = make_mesh(tp=config.mesh.tp, dp=config.mesh.dp, ep=config.mesh.ep, devices=config.mesh.devices)
    progress.finish()
    runners: list[Runner] = []

    def prepare(model: "ModelConfig", tokenizer: "Tokenizer") -> None:
        # Programs are compiled, or read from the cache, while the weights are read.
        _check_fits(config, model)
        runners[:] = [_build_runner(config, model, tokenizer.vocab_size, mesh)]
        runners[0].begin_warm_up()

    loaded = resolve_and_load(
        config.model, dtype=config.dtype, cache_dir=cache_dir, mesh=mesh, progress=progress, on_known=prepare
    )
    (runner,) = runners
    runner.load(loaded.params)
    engine = _build_engine(config, runner, on_step_done, progress)
    return Launched(engine, engine.start, loaded.tokenizer, _facts(config, loaded, engine, runner, mesh))


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs between starts, apart for each kind of processor: they may use its instructions."""
    import jax

    target = folder / _processor_digest()
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compiled programs cannot be kept", reason=error.strerror)
        return
    settings: dict[str, object] = {
        "jax_compilation_cache_dir": str(target),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)


def _processor_digest() -> str:
    """Names the versions and processor features that compiled code may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    kinds = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    text = "\n".join([metadata.version("jaxlib"), platform.machine(), platform.processor(), *kinds])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_fits(config: ServerConfig, model: "ModelConfig") -> None:
    longest = model.max_position_embeddings
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the {longest} that {config.model} was made for"
        )


def _build_runner(
    config: ServerConfig, model: "ModelConfig", vocab_size: int, mesh: "jax.sharding.Mesh | None"
) -> "Runner":
    import jax.numpy as jnp

    from model.kv_cache import default_num_pages
    from model.runner import Runner, RunnerConfig

    limits, cache = config.scheduler_config, config.kv_cache_config
    dtype = jnp.dtype(config.dtype)
    kv_dtype = dtype if cache.dtype == "auto" else jnp.dtype(cache.dtype)
    num_pages = cache.num_pages or default_num_pages(
        model, cache.page_size, kv_dtype, limits.max_num_seqs, config.max_model_len, cache.memory_fraction
    )
    shapes = RunnerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_pages=num_pages,
        page_size=cache.page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        vocab_size=vocab_size,
    )
    return Runner(shapes, model, mesh)


def _build_engine(
    config: ServerConfig, runner: "Runner", on_step_done: Callable[[], None], progress: Progress
) -> "Engine":
    from model.engine import Engine

    scheduler = Scheduler(config.scheduler_limits(runner.config.num_pages), log=DecisionLog())
    return Engine(
        scheduler,
        runner,
        on_step_done=on_step_done,
        before_step=fault_point(config, ENGINE_STEP),
        on_warm_up=_WarmUpProgress(progress),
    )


def fault_point(config: ServerConfig, point: str) -> FaultPoint:
    """The faults that the configuration puts at one point; usually none."""
    chosen = [fault for fault in config.faults if fault.point == point]
    return FaultPoint([Fault(parse_action(fault.action), fault.after, fault.count) for fault in chosen])


class _WarmUpProgress:
    """Turns the runner's `(done, total)` into steps of a `Progress`."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._done: int | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._done is None:
            self._progress.start("warming up", total)
            self._done = 0
        self._progress.advance(done - self._done)
        self._done = done
        if done == total:
            self._progress.finish()


def _facts(
    config: ServerConfig, loaded: "LoadedModel", engine: "Engine", runner: "Runner", mesh: "jax.sharding.Mesh | None"
) -> ModelFacts:
    import jax

    device = jax.devices()[0]
    count = 1 if mesh is None else mesh.size
    kind = device.device_kind if device.platform != "cpu" else (platform.processor() or platform.machine())
    shapes = runner.config
    architecture = asdict(loaded.config)
    return ModelFacts(
        name=loaded.name,
        device=f"{count} × {device.platform.upper()} ({kind})",
        details={
            "devices": {"platform": device.platform, "kind": device.device_kind, "count": count},
            "mesh": {"tp": config.mesh.tp, "dp": config.mesh.dp, "ep": config.mesh.ep},
            "architecture": architecture,
            "weights": {"dtype": config.dtype, "digest": loaded.digest},
            "kernels": {"attention": engine.kernel_name},
            "kv_cache": {"num_pages": shapes.num_pages, "page_size": shapes.page_size, "dtype": str(shapes.kv_dtype)},
        },
    )
