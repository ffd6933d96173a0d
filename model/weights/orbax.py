"""Converted models as Orbax checkpoints: written once, restored shard by shard onto any mesh.

A folder holds `params/` (Orbax) and `twinmesh.json` (architecture, tokenizer, dtype, digest), which is written last: a
folder without it is not a checkpoint.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from model.config import ModelConfig, RopeScaling
from model.decoder import param_shapes
from model.errors import UnsupportedModelError
from model.mesh import param_sharding
from model.tokenizer import TokenizerSpec

METADATA = "twinmesh.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What `twinmesh.json` says."""

    config: ModelConfig
    tokenizer: TokenizerSpec
    dtype: str
    digest: str


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint of ours."""
    return (folder / METADATA).is_file()


def read_info(folder: Path) -> CheckpointInfo:
    """Read a checkpoint's metadata. Raises UnsupportedModelError for another format version or a broken file."""
    try:
        raw = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise UnsupportedModelError(f"{folder.name} has checkpoint format {raw['format']}, this version reads {FORMAT}")
        fields: dict[str, Any] = raw["config"]
        rope = fields["rope_scaling"]
        rope["factors"] = tuple(rope["factors"])
        fields["rope_scaling"] = RopeScaling(**rope)
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return CheckpointInfo(
            ModelConfig(**fields), TokenizerSpec.from_dict(raw["tokenizer"]), raw["dtype"], raw["digest"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{folder.name}/{METADATA} is broken: {error}") from error


def save(folder: Path, info: CheckpointInfo, params: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write a checkpoint beside `folder` and move it into place; another process may do the same at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary.absolute() / "params", _nested(dict(params)))
            checkpointer.wait_until_finished()
        text = json.dumps(
            {
                "format": FORMAT,
                "config": asdict(info.config),
                "tokenizer": info.tokenizer.to_dict(),
                "dtype": info.dtype,
                "digest": info.digest,
            }
        )
        (temporary / METADATA).write_text(text, encoding="utf-8")
        if folder.exists():
            if is_checkpoint(folder):
                return
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not is_checkpoint(folder):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def restore(folder: Path, info: CheckpointInfo, mesh: jax.sharding.Mesh | None) -> dict[str, jax.Array]:
    """Every parameter by path, each leaf read straight onto its own shards."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=device if mesh is None else param_sharding(path, leaf.shape, mesh)
        )
        for path, leaf in param_shapes(info.config, jnp.dtype(info.dtype)).items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder.absolute() / "params", _nested(wanted))
    return _flat(restored)


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
