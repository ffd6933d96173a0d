"""From the name of a model to weights on the mesh and a tokenizer. Called by the launcher.

A GGUF file or a Hugging Face folder is converted once and kept as an Orbax checkpoint in the cache folder; later starts
restore that. A checkpoint folder of ours is served as it is.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from model.config import ModelConfig
from model.decoder import param_shapes
from model.default_model import BUILT_IN, fetch
from model.errors import DamagedCheckpointError, ModelNotFoundError, OfflineError, UnsupportedModelError
from model.progress import NoProgress, Progress
from model.tokenizer import Tokenizer
from model.weights.convert import convert
from model.weights.gguf import open_gguf
from model.weights.orbax import FORMAT, CheckpointInfo, is_checkpoint, read_info, restore, save
from model.weights.safetensors import open_safetensors
from model.weights.source import WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve.

    Attributes:
        name: how it is called by default. config: its architecture.
        params: path → array on the mesh, as `model.decoder.param_shapes` lists them.
        tokenizer: its tokenizer.
        digest: of architecture, dtype and weights; equal on two servers exactly when these are.
    """

    name: str
    config: ModelConfig
    params: dict[str, jax.Array]
    tokenizer: Tokenizer
    digest: str


def resolve_and_load(
    source: str,
    *,
    dtype: str,
    cache_dir: Path,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
    on_known: Callable[[ModelConfig, Tokenizer], None] = lambda config, tokenizer: None,
) -> LoadedModel:
    """Find, if need be convert, and restore a model.

    Args:
        source: a built-in name, a .gguf file, a Hugging Face folder or id, or a checkpoint folder of ours.
        dtype: `float32` or `bfloat16`.
        cache_dir: where downloads and converted checkpoints are kept.
        mesh: where the weights go; None for one device.
        progress: told of download, conversion and restore.
        on_known: called when everything but the weights is known, before these are read; again if they prove damaged.

    Raises:
        ModelNotFoundError, UnsupportedModelError, OfflineError, ChecksumError; DamagedCheckpointError for a checkpoint
        folder given as `source` (a damaged one in the cache is made again).
    """
    progress = progress or NoProgress()
    path, name = _locate(source, cache_dir, progress)
    if is_checkpoint(path):
        info = read_info(path)
        if info.dtype != dtype:
            raise UnsupportedModelError(f"{path.name} holds {info.dtype}: set dtype to that, not to {dtype}")
        return _restore(name, path, info, mesh, progress, on_known)
    folder = cache_dir / "checkpoints" / _cache_key(path, dtype)
    if is_checkpoint(folder):
        try:
            return _restore(name, folder, read_info(folder), mesh, progress, on_known)
        except DamagedCheckpointError as error:
            logger.warning("%s; converting again", error)
            shutil.rmtree(folder, ignore_errors=True)
    _convert(folder, open_gguf(path) if path.is_file() else open_safetensors(path), dtype, progress)
    return _restore(name, folder, read_info(folder), mesh, progress, on_known)


def _locate(source: str, cache_dir: Path, progress: Progress) -> tuple[Path, str]:
    """(file or folder, name to serve under)."""
    if source in BUILT_IN:
        return fetch(source, cache_dir, progress), source
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path, path.stem
    if path.is_dir() and (is_checkpoint(path) or (path / "config.json").is_file()):
        return path, path.resolve().name
    if not path.exists() and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _download_from_hub(source, progress), source
    raise ModelNotFoundError(
        f"model {source!r} is neither built in ({', '.join(BUILT_IN)}), nor a .gguf file, nor a folder with a "
        "config.json or a converted checkpoint, nor a Hugging Face id (organisation/name)"
    )


def _download_from_hub(name: str, progress: Progress) -> Path:
    """The folder of a Hugging Face id, from the hub's own cache where it has it."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise OfflineError(f"{name} is not a local path; to download it install huggingface_hub") from error
    progress.start(f"downloading {name}", None)
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja"], ignore_patterns=["*/*", "consolidated*"]
            )
        )
    except errors.GatedRepoError as error:
        raise OfflineError(f"{name} needs a Hugging Face account that may read it: log in, or give a folder") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(f"{name} is neither a local path nor a model on Hugging Face") from error
    except Exception as error:  # the client raises many types, all of which mean that the files are not here
        raise OfflineError(
            f"{name} is not in Hugging Face's cache and could not be downloaded ({type(error).__name__}); give a folder"
        ) from error
    finally:
        progress.finish()


def _cache_key(path: Path, dtype: str) -> str:
    """Names a source's converted checkpoint without reading gigabytes: names, sizes, times and heads of its files."""
    hasher = hashlib.sha256(f"{FORMAT}/{dtype}".encode())
    folder = path.parent if path.is_file() else path
    names = [path.name] if path.is_file() else [entry.name for entry in folder.iterdir()]
    for name in sorted(names):
        file = folder / name
        if file.suffix in (".gguf", ".json", ".safetensors", ".jinja"):
            stat = file.stat()
            hasher.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode())
            with file.open("rb") as handle:
                hasher.update(handle.read(1 << 20))
    return hasher.hexdigest()[:32]


def _convert(folder: Path, source: WeightSource, dtype: str, progress: Progress) -> None:
    progress.start("converting weights", len(param_shapes(source.config, jax.numpy.dtype(dtype))))
    params = {}
    try:
        for path, array in convert(source, dtype):
            params[path] = array
            progress.advance(1)
        save(folder, source.config, source.tokenizer, dtype, params)
    finally:
        progress.finish()


def _restore(
    name: str,
    folder: Path,
    info: CheckpointInfo,
    mesh: jax.sharding.Mesh | None,
    progress: Progress,
    on_known: Callable[[ModelConfig, Tokenizer], None],
) -> LoadedModel:
    tokenizer = Tokenizer(info.tokenizer)
    if tokenizer.vocab_size > info.config.vocab_size:
        raise UnsupportedModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's table only {info.config.vocab_size} rows"
        )
    on_known(info.config, tokenizer)
    progress.start("loading weights", None)
    try:
        params = restore(folder, info, mesh)
    finally:
        progress.finish()
    return LoadedModel(name, info.config, params, tokenizer, info.digest)
