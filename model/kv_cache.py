"""The KV arrays on the device, and how many pages to have. Built by `model/runner.py`."""

import jax
import jax.numpy as jnp

from model.config import ModelConfig
from model.mesh import kv_sharding

CPU_LIMIT_BYTES = 2 << 30


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(dtype).itemsize


def default_num_pages(
    config: ModelConfig, page_size: int, dtype: jnp.dtype, max_num_seqs: int, max_model_len: int, memory_fraction: float
) -> int:
    """Usable pages when the config names no number: on a GPU what `memory_fraction` of the free memory holds, elsewhere
    enough for every slot at full length, at most 2 GiB. At least one.
    """
    size = page_bytes(config, page_size, dtype)
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        return max(1, int(free * memory_fraction) // size)
    wanted = max_num_seqs * -(-max_model_len // page_size)
    return max(1, min(wanted, CPU_LIMIT_BYTES // size))


def abstract_kv(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, mesh: jax.sharding.Mesh | None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """One [num_pages + 1, 2K, page_size, D] array per layer, described but not allocated; page 0 is the sink."""
    shape = (num_pages + 1, 2 * config.num_kv_heads, page_size, config.head_dim)
    sharding = kv_sharding(mesh, config.num_kv_heads) if mesh is not None else None
    return (jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),) * config.num_layers


def allocate(described: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
    """Zeroed arrays for a description. Blocks until the memory is there."""
    arrays = tuple(jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for leaf in described)
    return jax.block_until_ready(arrays)
