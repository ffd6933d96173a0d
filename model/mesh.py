"""Device meshes, and which axis of which array is spread over them. Called by the loader, the KV arrays and the step.

Rules are by logical axis: `vocab`, `kv_heads` and `mlp` go to the mesh axis `tp` where they divide by it, and are
replicated where they do not (SmolLM2 has 3 KV heads: at tp=2 its MLP and head are split, its attention is not).
`dp` spreads the tokens of a step; weights and KV are replicated over it.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model.errors import ModelError

# Logical axes by the last two parts of a weight's path; None is never split.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed/embedding": ("vocab", None),
    "head/kernel": ("vocab", None),
    "qkv/kernel": (None, "kv_heads", None, None),
    "qkv/bias": ("kv_heads", None, None),
    "out/kernel": ("kv_heads", None, None, None),
    "gate_up/kernel": (None, None, "mlp"),
    "down/kernel": ("mlp", None),
}


class MeshError(ModelError):
    """A mesh that this machine or this version cannot build."""


def parse_devices(text: str | int | Sequence[int] | None) -> list[int] | None:
    """`"0-3,6"`, an index or a list of indices → indices; None stays None. Raises MeshError."""
    if text is None:
        return None
    if not isinstance(text, str):
        return [text] if isinstance(text, int) else list(text)
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise MeshError(f"devices must look like '0-3,6', not {text!r}")
        indices.extend(range(int(first), int(last if dash else first) + 1))
    return indices


def make_mesh(tp: int = 1, dp: int = 1, ep: int = 1, devices: str | int | Sequence[int] | None = None) -> Mesh | None:
    """A mesh with axes (dp, tp), or None when the first device alone serves.

    Args:
        tp: devices that share each layer.
        dp: groups of them, each with part of a step's tokens.
        ep: devices that share experts; 1 for now.
        devices: indices into `jax.devices()`, tp × dp of them; None for the first ones.

    Raises:
        MeshError: too few or too many devices, an index that does not exist, or ep other than 1.
    """
    if ep != 1:
        raise MeshError(f"mesh.ep={ep} is not supported yet: it must be 1")
    if tp < 1 or dp < 1:
        raise MeshError(f"mesh sizes must be at least 1, not tp={tp}, dp={dp}")
    available = jax.devices()
    indices = parse_devices(devices)
    if indices is not None:
        _check_indices(indices, len(available), tp * dp)
    chosen = available if indices is None else [available[i] for i in indices]
    if tp * dp > len(chosen):
        raise MeshError(f"tp={tp} times dp={dp} needs {tp * dp} devices; there are {len(chosen)}")
    if tp * dp == 1 and indices is None:
        return None
    return jax.make_mesh((dp, tp), ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto), devices=chosen[: tp * dp])


def _check_indices(indices: Sequence[int], available: int, wanted: int) -> None:
    missing = [index for index in indices if not 0 <= index < available]
    if missing:
        raise MeshError(f"device {missing[0]} does not exist here: there are {available}, counted from 0")
    if len(set(indices)) < len(indices):
        raise MeshError("a device is listed twice")
    if len(indices) > wanted:
        raise MeshError(f"{len(indices)} devices are listed, but tp times dp is {wanted}")


def _spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    size = mesh.shape["tp"]
    return PartitionSpec(
        *("tp" if axis and size > 1 and length % size == 0 else None for axis, length in zip(axes, shape, strict=True))
    )


def param_sharding(path: str, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Where the weight at `path` (as in `model.decoder.param_shapes`) lives on the mesh."""
    axes = LOGICAL_AXES.get("/".join(path.split("/")[-2:]), (None,) * len(shape))
    return NamedSharding(mesh, _spec(axes, shape, mesh))


def kv_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """Where KV [P, 2K, page_size, D] lives: split over heads where K divides, so that key and value stay together."""
    split = mesh.shape["tp"] > 1 and num_kv_heads % mesh.shape["tp"] == 0
    return NamedSharding(mesh, PartitionSpec(None, "tp" if split else None))
