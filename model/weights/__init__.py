"""From the name of a model to weights on the mesh and a tokenizer. Called by the launcher.

A GGUF file or a Hugging Face folder is converted once and kept as an Orbax checkpoint in the cache folder; later starts
restore that. A checkpoint folder of ours is served as it is.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax

from model.config import ModelConfig
from model.decoder import param_shapes
from model.default_model import BUILT_IN, fetch
from model.errors import ModelNotFoundError, OfflineError, UnsupportedModelError
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
        tokenizer: its tokenizer. digest: identifies source and dtype, equal on two servers that hold the same weights.
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
) -> LoadedModel:
    """Find, if need be convert, and restore a model.

    Args:
        source: a built-in name, a .gguf file, a Hugging Face folder or id, or a checkpoint folder of ours.
        dtype: `float32` or `bfloat16`.
        cache_dir: where downloads and converted checkpoints are kept.
        mesh: where the weights go; None for one device.
        progress: told of download, conversion and restore.

    Raises:
        ModelNotFoundError, UnsupportedModelError, OfflineError, ChecksumError.
    """
    progress = progress or NoProgress()
    path, name = _locate(source, cache_dir, progress)
    if path.is_dir() and is_checkpoint(path):
        info = read_info(path)
        if info.dtype != dtype:
            raise UnsupportedModelError(f"the checkpoint holds {info.dtype}, the configuration asks for {dtype}")
        return _restore(name, path, info, mesh, progress)
    digest = _digest(path, dtype)
    folder = cache_dir / "checkpoints" / digest[:32]
    if is_checkpoint(folder):
        try:
            return _restore(name, folder, read_info(folder), mesh, progress)
        except Exception as error:  # Orbax raises many types for a damaged checkpoint
            logger.warning("the converted checkpoint is damaged (%s); converting again", type(error).__name__)
            shutil.rmtree(folder, ignore_errors=True)
    opened = open_gguf(path) if path.is_file() else open_safetensors(path)
    info = CheckpointInfo(opened.config, opened.tokenizer, dtype, digest)
    _convert(folder, info, opened, progress)
    return _restore(name, folder, info, mesh, progress)


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
        f"model {source!r} is neither built in ({', '.join(BUILT_IN)}), nor a .gguf file, nor a folder with a config.json "
        "or a converted checkpoint, nor a Hugging Face id (organisation/name)"
    )


def _download_from_hub(name: str, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise OfflineError(f"{name} is not a local path; to download it install huggingface_hub") from error
    progress.start(f"downloading {name}", None)
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many types, all of which mean that the files are not here
        raise OfflineError(f"{name} could not be downloaded ({type(error).__name__}); give a local folder") from error
    finally:
        progress.finish()


def _digest(path: Path, dtype: str) -> str:
    """Identifies a source without reading gigabytes: names, sizes and heads of its files, the dtype, our format."""
    hasher = hashlib.sha256(f"{FORMAT}/{dtype}".encode())
    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".jinja"))
    for file in files:
        stat = file.stat()
        times = "" if path.is_file() and path.parent.name == "downloads" else str(stat.st_mtime_ns)
        hasher.update(json.dumps([file.name, stat.st_size, times]).encode())
        with file.open("rb") as handle:
            hasher.update(handle.read(1 << 20))
    return hasher.hexdigest()


def _convert(folder: Path, info: CheckpointInfo, source: WeightSource, progress: Progress) -> None:
    total = len(param_shapes(info.config, jax.numpy.dtype(info.dtype)))
    progress.start("converting weights", total)

    def counted():
        for item in convert(source, info.dtype):
            yield item
            progress.advance(1)

    save(folder, info, counted())
    progress.finish()


def _restore(
    name: str, folder: Path, info: CheckpointInfo, mesh: jax.sharding.Mesh | None, progress: Progress
) -> LoadedModel:
    progress.start("loading weights", None)
    params = restore(folder, info, mesh)
    tokenizer = Tokenizer(info.tokenizer)
    progress.finish()
    return LoadedModel(name, info.config, params, tokenizer, info.digest)
