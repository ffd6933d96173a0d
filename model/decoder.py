"""The decoder: a Flax NNX module tree driven by `ModelConfig`, over one step's ragged tokens and the paged KV.

`model/step.py` calls it inside the jitted step. Weights have the paths of `param_shapes`; `model/weights/` produces
them under these paths. Activations between matrix products are float32; products run in the weights' dtype.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernels.attention import AttentionKernels, AttentionOptions, RaggedBatch
from kernels.linear import linear, transposed_linear
from model.config import ModelConfig
from model.rope import rope_frequencies, rotate

Array = jax.Array


class Linear(nnx.Module):
    """A kernel [*inputs, *outputs] and, if asked for, a bias [*outputs]."""

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int], dtype: jnp.dtype, bias: bool = False):
        self.num_input_axes = len(inputs)
        self.kernel = nnx.Param(jnp.zeros((*inputs, *outputs), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros(tuple(outputs), dtype))

    def __call__(self, inputs: Array) -> Array:
        """[T, *inputs] → [T, *outputs] float32."""
        result = linear(inputs, self.kernel[...], self.num_input_axes)
        return result + self.bias[...].astype(jnp.float32) if hasattr(self, "bias") else result


class RmsNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, inputs: Array) -> Array:
        """Same shape, float32."""
        inputs = inputs.astype(jnp.float32)
        variance = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
        return inputs * jax.lax.rsqrt(variance + self.epsilon) * self.scale[...]


class Attention(nnx.Module):
    """Grouped-query attention over the paged KV."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.group = config.group_size
        heads, head_dim, hidden = config.num_kv_heads, config.head_dim, config.hidden_size
        self.qkv = Linear([hidden], [heads, self.group + 2, head_dim], dtype, bias=config.qkv_bias)
        self.out = Linear([heads, self.group, head_dim], [hidden], dtype)
        if config.qk_norm:
            self.q_norm = RmsNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RmsNorm(head_dim, config.rms_norm_eps)

    def __call__(
        self,
        hidden: Array,
        rotation: tuple[Array, Array],
        kv_pages: Array,
        batch: RaggedBatch,
        options: AttentionOptions,
        kernels: AttentionKernels,
    ) -> tuple[Array, Array]:
        """Hidden states [T, E] → ([T, E], kv_pages with this step's keys and values written)."""
        mixed = self.qkv(hidden)
        queries, keys, values = mixed[:, :, : self.group], mixed[:, :, self.group], mixed[:, :, self.group + 1]
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        cosine, sine = rotation
        queries = rotate(queries, cosine[:, None, None], sine[:, None, None])
        keys = rotate(keys, cosine[:, None], sine[:, None])
        kv_pages = kernels.write(kv_pages, keys, values, batch)
        return self.out(kernels.attend(queries, kv_pages, batch, options)), kv_pages


class Mlp(nnx.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.gate_up = Linear([config.hidden_size], [2, config.intermediate_size], dtype)
        self.down = Linear([config.intermediate_size], [config.hidden_size], dtype)

    def __call__(self, hidden: Array) -> Array:
        """[T, E] → [T, E]."""
        both = self.gate_up(hidden)
        return self.down(jax.nn.silu(both[:, 0]) * both[:, 1])


class Layer(nnx.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config, dtype)

    def __call__(
        self,
        hidden: Array,
        rotation: tuple[Array, Array],
        kv_pages: Array,
        batch: RaggedBatch,
        options: AttentionOptions,
        kernels: AttentionKernels,
    ) -> tuple[Array, Array]:
        """Hidden states [T, E] float32 → the same, and the layer's KV."""
        attended, kv_pages = self.attention(self.attention_norm(hidden), rotation, kv_pages, batch, options, kernels)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden)), kv_pages


@functools.partial(jax.jit, static_argnames=("graph", "options", "kernels"))
def _run_layer(
    graph: nnx.GraphDef[Layer],
    weights: nnx.State,
    hidden: Array,
    rotation: tuple[Array, Array],
    kv_pages: Array,
    batch: RaggedBatch,
    options: AttentionOptions,
    kernels: AttentionKernels,
) -> tuple[Array, Array]:
    """One layer. Jitted on its own, so that layers of one shape are traced and lowered once; XLA inlines the calls."""
    return nnx.merge(graph, weights)(hidden, rotation, kv_pages, batch, options, kernels)


class Embedding(nnx.Module):
    """The token table [V, E]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))


class Head(nnx.Module):
    """An untied output table [V, E]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.kernel = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))


class Decoder(nnx.Module):
    """The whole model. Built abstractly (`nnx.eval_shape`); weights are merged in by the step."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config = config
        self.embed = Embedding(config, dtype)
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_layers)])
        self.final_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = Head(config, dtype)

    def __call__(
        self,
        token_ids: Array,
        batch: RaggedBatch,
        kv: Sequence[Array],
        *,
        kernels: AttentionKernels,
        single_token_rows: bool,
    ) -> tuple[Array, tuple[Array, ...]]:
        """One forward pass over a step's tokens.

        Args:
            token_ids: [T] int32.
            batch: where each token stands.
            kv: one [P, 2K, page_size, D] array per layer.
            kernels: the attention implementation.
            single_token_rows: see `AttentionOptions`.

        Returns:
            Normed hidden states [T, E] float32, and the KV arrays with the step's tokens written.
        """
        config = self.config
        options = AttentionOptions(
            scale=config.head_dim**-0.5, sliding_window=config.sliding_window, single_token_rows=single_token_rows
        )
        angles = batch.positions.astype(jnp.float32)[:, None] * rope_frequencies(config)[None]
        rotation = (jnp.cos(angles), jnp.sin(angles))
        hidden = self.embed.embedding[...][token_ids].astype(jnp.float32)
        new_kv = []
        for layer, kv_pages in zip(self.layers, kv, strict=True):
            graph, weights = nnx.split(layer)
            hidden, written = _run_layer(graph, weights, hidden, rotation, kv_pages, batch, options, kernels)
            new_kv.append(written)
        return self.final_norm(hidden), tuple(new_kv)

    def logits(self, hidden: Array) -> Array:
        """Hidden states [R, E] → [R, V] float32."""
        table = self.embed.embedding if self.config.tie_word_embeddings else self.head.kernel
        return transposed_linear(hidden, table[...])


AbstractState = list[tuple[tuple[Any, ...], Any]]


@functools.cache
def abstract_decoder(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef, AbstractState]:
    """The module graph, and each parameter's path with its shape and dtype; no memory is used."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    return graph, [(path, leaf) for path, leaf in nnx.to_flat_state(state)]


def bind(graph: nnx.GraphDef, leaves: AbstractState, weights: Sequence[Array]) -> Decoder:
    """The decoder over actual weights, given in the order of `leaves`."""
    bound = [(path, leaf.replace(weight)) for (path, leaf), weight in zip(leaves, weights, strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(bound))


def param_shapes(config: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Path (`layers/0/mlp/down/kernel`) → shape and dtype of every weight, in the step's order."""
    leaves = abstract_decoder(config, dtype)[1]
    return {"/".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves}
