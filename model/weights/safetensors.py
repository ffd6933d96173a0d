"""A Hugging Face folder as a `WeightSource`: config.json, one safetensors file or a sharded index, and a tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig, RopeScaling
from model.errors import UnsupportedModelError
from model.tokenizer import spec_from_folder
from model.weights.source import WeightSource

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def open_safetensors(folder: Path) -> WeightSource:
    """Read a folder's configuration; tensors are read on demand.

    Raises:
        UnsupportedModelError: an architecture, rope scaling or quantisation that is not implemented, or missing files.
    """
    from safetensors import safe_open

    files = _tensor_files(folder)
    config = read_config(folder, has_head="lm_head.weight" in files)
    tokenizer = spec_from_folder(folder, config.bos_token_id, config.eos_token_ids)
    config = replace(config, bos_token_id=tokenizer.bos_token_id, eos_token_ids=tokenizer.eos_token_ids)
    for name in files:
        known = config.qkv_bias and name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias"))
        if name.endswith(".bias") and not known:
            raise UnsupportedModelError(f"the tensor {name} is not supported for this architecture")
    handles: dict[str, Any] = {}

    def read(name: str) -> np.ndarray:
        if name not in files:
            raise UnsupportedModelError(f"{folder.name} has no tensor {name}")
        file = files[name]
        if file not in handles:
            handles[file] = safe_open(str(folder / file), framework="numpy")
        return handles[file].get_tensor(name)

    return WeightSource(config, tokenizer, read)


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name → file name."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        mapping = json.loads(index.read_text())["weight_map"]
        if any("/" in file or file.startswith(".") for file in mapping.values()):
            raise UnsupportedModelError(f"{index.name} names files outside its folder")
        return mapping
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UnsupportedModelError(f"{folder.name} has neither model.safetensors nor model.safetensors.index.json")
    with safe_open(str(single), framework="numpy") as handle:
        return dict.fromkeys(handle.keys(), single.name)


def read_config(folder: Path, *, has_head: bool) -> ModelConfig:
    """The architecture of a Hugging Face folder, written by any version of transformers.

    Args:
        folder: where config.json and perhaps generation_config.json are.
        has_head: whether the files hold an output table; decides where `tie_word_embeddings` is left out.

    Raises:
        UnsupportedModelError: not one of the architectures here, or an option that is not implemented.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = raw.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {names[0]!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[names[0]]
    _refuse_options(raw, architecture)
    try:
        return _config(folder, raw, architecture, has_head)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{folder.name}/config.json lacks or has an unexpected {error}") from error


def _refuse_options(raw: dict[str, Any], architecture: str) -> None:
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantised safetensors checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {raw['hidden_act']!r} is not supported")
    if raw.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias is not supported")
    if architecture != "qwen2" and raw.get("attention_bias"):
        raise UnsupportedModelError("attention_bias is not supported for this architecture")


def _config(folder: Path, raw: dict[str, Any], architecture: str, has_head: bool) -> ModelConfig:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = int(raw["num_attention_heads"])
    bos, eos = _token_ids(folder, raw)
    tied = raw.get("tie_word_embeddings")
    head_dim = raw.get("head_dim") or (128 if architecture == "qwen3" else raw["hidden_size"] // heads)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope),
        sliding_window=_sliding_window(raw, architecture),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=(not has_head) if tied is None else bool(tied),
        bos_token_id=bos,
        eos_token_ids=eos,
    )


def _token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Start and end tokens; generation_config.json wins, since it lists every id that ends a turn."""
    generation = folder / "generation_config.json"
    merged = {**raw, **(json.loads(generation.read_text()) if generation.is_file() else {})}
    bos, eos = merged.get("bos_token_id"), merged.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return (bos[0] if isinstance(bos, list) else bos), tuple(ids)


def _sliding_window(raw: dict[str, Any], architecture: str) -> int | None:
    """The window that all layers share. Qwen slides in the layers from `max_window_layers` on, and only if told to."""
    window = raw.get("sliding_window")
    if not window or architecture == "llama":
        return None
    if architecture == "mistral":
        return int(window)
    if not raw.get("use_sliding_window"):
        return None
    layers = int(raw["num_hidden_layers"])
    first = int(raw.get("max_window_layers", 28))
    kinds = set(raw.get("layer_types") or [])
    kinds = kinds or {"sliding_attention" if layer >= first else "full_attention" for layer in range(layers)}
    if len(kinds) > 1:
        raise UnsupportedModelError("a mix of sliding and full attention layers is not supported yet")
    return int(window) if kinds == {"sliding_attention"} else None


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling:
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModelError("rotary parameters that differ from layer to layer are not supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported")
