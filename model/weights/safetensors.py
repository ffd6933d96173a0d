"""A Hugging Face folder as a `WeightSource`: config.json, one safetensors file or a sharded index, and a tokenizer."""

import json
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

    config = read_config(folder)
    files = _tensor_files(folder)
    handles: dict[str, Any] = {}

    def read(name: str) -> np.ndarray:
        if name not in files:
            raise UnsupportedModelError(f"{folder.name} has no tensor {name}")
        file = files[name]
        if file not in handles:
            handles[file] = safe_open(str(folder / file), framework="numpy")
        return handles[file].get_tensor(name)

    return WeightSource(config, spec_from_folder(folder, config.bos_token_id, config.eos_token_ids), read)


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


def read_config(folder: Path) -> ModelConfig:
    """The architecture of a Hugging Face folder. Raises UnsupportedModelError."""
    raw = json.loads((folder / "config.json").read_text())
    names = raw.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {names[0]!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantised safetensors checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {raw['hidden_act']!r} is not supported")
    if raw.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias is not supported")
    architecture = ARCHITECTURES[names[0]]
    if architecture in ("llama", "mistral", "qwen3") and raw.get("attention_bias"):
        raise UnsupportedModelError("attention_bias is not supported for this architecture")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = raw["num_attention_heads"]
    bos, eos = _token_ids(folder, raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope),
        sliding_window=_sliding_window(raw, architecture),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=raw.get("tie_word_embeddings", architecture == "qwen2"),
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
    if architecture in ("qwen2", "qwen3") and not raw.get("use_sliding_window"):
        return None
    window = raw.get("sliding_window")
    layers = raw.get("layer_types") or []
    if window and len(set(layers)) > 1:
        raise UnsupportedModelError("a mix of sliding and full attention layers is not supported yet")
    if layers and set(layers) == {"full_attention"}:
        return None
    return window or None


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling:
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
