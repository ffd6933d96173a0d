"""A GGUF file as a `WeightSource`: architectures llama (Mistral too), qwen2, qwen3, any block type gguf can dequantise.

llama.cpp interleaves the rotary halves of q and k for the llama architecture; that is undone here.
"""

from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig, RopeScaling
from model.errors import UnsupportedModelError
from model.gguf_tokenizer import tokenizer_spec
from model.tokenizer import TokenizerSpec
from model.weights.source import WeightSource

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def open_gguf(path: Path) -> WeightSource:
    """Read a file's header; tensors are mapped and read on demand.

    Raises:
        UnsupportedModelError: not a GGUF file, or an architecture, rope scaling or tokenizer that is not implemented.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except (ValueError, OSError, KeyError) as error:
        raise UnsupportedModelError(f"{path.name} is not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _refuse_kinds(metadata, tensors)
    try:
        tokenizer = tokenizer_spec(metadata)
        config = _config(metadata, tensors, tokenizer)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} lacks or has an unexpected {error}") from error
    permuted = config.architecture == "llama"

    def read(name: str) -> np.ndarray:
        tensor = tensors.get(_gguf_name(name))
        if tensor is None:
            raise UnsupportedModelError(f"{path.name} has no tensor {_gguf_name(name)}")
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"{path.name}: tensors of type {tensor.tensor_type.name}") from error
        array = array.reshape([int(size) for size in reversed(tensor.shape)])
        if permuted and ".q_proj." in name:
            return _interleaved_to_halves(array, config.num_heads)
        if permuted and ".k_proj." in name:
            return _interleaved_to_halves(array, config.num_kv_heads)
        return array

    return WeightSource(config, tokenizer, read)


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_LAYER_NAMES[module]}.{kind}"


def _interleaved_to_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows (2i, 2i+1) of each head become rows (i, i + D/2)."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _refuse_kinds(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    if "blk.0.ffn_gate_inp.weight" in tensors:
        raise UnsupportedModelError("mixture-of-experts GGUF files are not supported yet")
    for name in tensors:
        if name.endswith(".bias") and not name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias")):
            raise UnsupportedModelError(f"the tensor {name} is not supported")


def _config(metadata: dict[str, Any], tensors: dict[str, Any], tokenizer: TokenizerSpec) -> ModelConfig:
    architecture = metadata["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise KeyError(f"{architecture}.{key}")
        if isinstance(found, list):
            raise UnsupportedModelError(f"{architecture}.{key} differs from layer to layer, which is not supported")
        return found

    heads = int(value("attention.head_count"))
    hidden = int(value("embedding_length"))
    head_dim = int(value("attention.key_length", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(value(key, head_dim)) != head_dim:
            raise UnsupportedModelError(f"{architecture}.{key} other than the key length is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=int(value("feed_forward_length")),
        num_layers=int(value("block_count")),
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position_embeddings=int(value("context_length")),
        # Stored as float32; the shortest decimal is what the model was trained with.
        rms_norm_eps=float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(value, tensors),
        sliding_window=int(value("attention.sliding_window", 0)) or None,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _rope_scaling(value: Any, tensors: dict[str, Any]) -> RopeScaling:
    if "rope_freqs.weight" in tensors:
        factors = np.asarray(tensors["rope_freqs.weight"].data, np.float64)
        return RopeScaling("factors", factors=tuple(factors.tolist()))
    kind = value("rope.scaling.type", "none")
    factor = float(value("rope.scaling.factor", value("rope.scale_linear", 1.0)))  # the second is the older name
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return RopeScaling("linear", factor=factor)
    if kind == "none":
        return RopeScaling()
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported")
