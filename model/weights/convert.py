"""From tensors under Hugging Face names to the decoder's parameters. Called by `model/weights/__init__.py`."""

import math
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.decoder import param_shapes
from model.errors import UnsupportedModelError
from model.weights.source import WeightSource


def convert(source: WeightSource, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (path, array) for every parameter of `model.decoder.param_shapes`, one at a time.

    Norm scales stay float32; everything else is rounded to `dtype` (`float32` or `bfloat16`).

    Raises:
        UnsupportedModelError: a tensor is missing, or has a shape that the configuration does not call for.
    """
    shapes = param_shapes(source.config, jnp.dtype(dtype))
    for path, array in _arrays(source, dtype):
        if array.shape != shapes[path].shape:
            raise UnsupportedModelError(f"{path} has shape {array.shape}, the configuration says {shapes[path].shape}")
        yield path, array


def _arrays(source: WeightSource, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    config = source.config
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)

    def weight(name: str) -> np.ndarray:
        return source.read(name).astype(np.float32, copy=False)

    def scale(name: str) -> np.ndarray:
        return np.ascontiguousarray(weight(name), np.float32)

    def store(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.astype(target))

    yield "embed/embedding", store(weight("model.embed_tokens.weight"))
    yield "final_norm/scale", scale("model.norm.weight")
    if not config.tie_word_embeddings:
        yield "head/kernel", store(weight("lm_head.weight"))
    for index in range(config.num_layers):
        here, prefix = f"layers/{index}", f"model.layers.{index}"
        yield f"{here}/attention_norm/scale", scale(f"{prefix}.input_layernorm.weight")
        yield f"{here}/mlp_norm/scale", scale(f"{prefix}.post_attention_layernorm.weight")
        yield f"{here}/attention/qkv/kernel", store(_qkv(config, weight, f"{prefix}.self_attn", "weight"))
        if config.qkv_bias:
            yield f"{here}/attention/qkv/bias", store(_qkv(config, weight, f"{prefix}.self_attn", "bias"))
        if config.qk_norm:
            yield f"{here}/attention/q_norm/scale", scale(f"{prefix}.self_attn.q_norm.weight")
            yield f"{here}/attention/k_norm/scale", scale(f"{prefix}.self_attn.k_norm.weight")
        out = weight(f"{prefix}.self_attn.o_proj.weight").T
        shape = (config.num_kv_heads, config.group_size, config.head_dim, config.hidden_size)
        yield f"{here}/attention/out/kernel", store(_reshaped(out, shape, f"{prefix}.self_attn.o_proj.weight"))
        gate, up = (weight(f"{prefix}.mlp.{name}_proj.weight").T for name in ("gate", "up"))
        yield f"{here}/mlp/gate_up/kernel", store(np.stack([gate, up], axis=1))
        yield f"{here}/mlp/down/kernel", store(weight(f"{prefix}.mlp.down_proj.weight").T)


def _reshaped(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    if array.size != math.prod(shape):
        raise UnsupportedModelError(
            f"{name} holds {array.size} numbers, the configuration calls for {math.prod(shape)}"
        )
    return array.reshape(shape)


def _qkv(config: ModelConfig, weight: Callable[[str], np.ndarray], prefix: str, kind: str) -> np.ndarray:
    """Queries of each KV head's group, its key and its value side by side: [E, K, G+2, D] (a bias: [K, G+2, D])."""
    heads, head_dim = config.num_kv_heads, config.head_dim
    parts = []
    for name, count in (("q_proj", config.group_size), ("k_proj", 1), ("v_proj", 1)):
        tensor = weight(f"{prefix}.{name}.{kind}")
        parts.append(_reshaped(tensor, (heads, count, head_dim, *tensor.shape[1:]), f"{prefix}.{name}.{kind}"))
    joined = np.concatenate(parts, axis=1)
    return joined if kind == "bias" else joined.transpose(3, 0, 1, 2)
