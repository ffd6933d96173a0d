"""Converted models as Orbax checkpoints: written once, restored shard by shard onto any mesh.

A folder holds `params/` (Orbax, uncompressed: restoring is then as fast as reading) and `twinmesh.json` (architecture,
tokenizer, dtype, digest, marks of all files), which is written last: a folder without it is not a checkpoint.
Called by `model/weights/__init__.py`.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from model.config import ModelConfig, RopeScaling
from model.errors import DamagedCheckpointError, UnsupportedModelError
from model.mesh import param_sharding
from model.tokenizer import TokenizerSpec

METADATA = "twinmesh.json"
FORMAT = 2
STALE_SECS = 86400.0
MARKED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What `twinmesh.json` says.

    Attributes:
        config: the architecture. tokenizer: what the tokenizer is made from. dtype: `float32` or `bfloat16`.
        digest: SHA-256 of architecture and parameters, the same wherever and from whatever files they were converted.
        arrays: path → shape and dtype.
        files: path below `params/` → its mark: size in bytes, and SHA-256 up to 1 MiB. Weights themselves are larger;
            reading them twice at each start would take too long.
    """

    config: ModelConfig
    tokenizer: TokenizerSpec
    dtype: str
    digest: str
    arrays: dict[str, tuple[list[int], str]]
    files: dict[str, str]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ours that was written to its end."""
    return (folder / METADATA).is_file()


def read_info(folder: Path) -> CheckpointInfo:
    """Read a checkpoint's metadata and compare the marks of its files.

    Raises:
        UnsupportedModelError: another format version.
        DamagedCheckpointError: the metadata does not parse, or a file is missing or has another mark.
    """
    try:
        raw = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise UnsupportedModelError(f"{folder} has checkpoint format {raw['format']}, this version reads {FORMAT}")
        info = CheckpointInfo(
            _config_from(raw["config"]),
            TokenizerSpec.from_dict(raw["tokenizer"]),
            raw["dtype"],
            raw["digest"],
            raw["arrays"],
            raw["files"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder / METADATA} is broken: {error}") from error
    found = _marks(folder / "params")
    for name, mark in info.files.items():
        if found.get(name) != mark:
            raise DamagedCheckpointError(f"{folder / 'params' / name} is missing or not as it was written")
    return info


def save(
    folder: Path, config: ModelConfig, tokenizer: TokenizerSpec, dtype: str, params: Mapping[str, np.ndarray]
) -> None:
    """Write a checkpoint beside `folder` and move it into place; another process may do the same at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    temporary = folder.parent / f".{folder.name}-{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        with ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save(temporary.absolute() / "params", _nested(params))
        arrays = {path: (list(array.shape), array.dtype.name) for path, array in params.items()}
        marks = _marks(temporary / "params")
        info = CheckpointInfo(config, tokenizer, dtype, _digest(config, params), arrays, marks)
        text = json.dumps({"format": FORMAT, **asdict(info)})
        (temporary / METADATA).write_text(text, encoding="utf-8")
        if folder.exists() and not is_checkpoint(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not is_checkpoint(folder):  # if it is one, another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def restore(folder: Path, info: CheckpointInfo, mesh: jax.sharding.Mesh | None) -> dict[str, jax.Array]:
    """Every parameter by path, each leaf read straight onto its own shards. Raises DamagedCheckpointError."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(
            shape, jnp.dtype(dtype), sharding=device if mesh is None else param_sharding(path, shape, mesh)
        )
        for path, (shape, dtype) in info.arrays.items()
    }
    tree = _nested(wanted)
    arguments = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    try:
        with ocp.Checkpointer(_handler()) as checkpointer:
            return _flat(checkpointer.restore(folder.absolute() / "params", args=arguments))
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # the device's fault, not the checkpoint's
    except Exception as error:  # Orbax and TensorStore raise many types for files that they cannot read
        raise DamagedCheckpointError(f"{folder} cannot be restored: {str(error)[:200]}") from error


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _config_from(fields: dict[str, Any]) -> ModelConfig:
    rope = fields["rope_scaling"]
    scaling = RopeScaling(**{**rope, "factors": tuple(rope["factors"])})
    return ModelConfig(**{**fields, "rope_scaling": scaling, "eos_token_ids": tuple(fields["eos_token_ids"])})


def _digest(config: ModelConfig, params: Mapping[str, np.ndarray]) -> str:
    hasher = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for path, array in sorted(params.items()):
        hasher.update(f"{path} {array.dtype} {array.shape}".encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return hasher.hexdigest()


def _marks(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _mark(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _mark(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} {hashlib.sha256(path.read_bytes()).hexdigest()}" if size <= MARKED_BYTES else str(size)


def _remove_stale(folder: Path) -> None:
    """What a killed conversion left behind."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECS:
            shutil.rmtree(leftover, ignore_errors=True)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
