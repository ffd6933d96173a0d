"""Small models on disk for the loader's tests, and tokenizers made by hand.

The models are the random checkpoints of `tests/fixtures/tiny`, with a tokenizer, also as GGUF files.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from model.default_model import default_cache_dir
from model.tokenizer import Tokenizer, TokenizerSpec
from model.weights import resolve_and_load

TINY = Path(__file__).parents[1] / "fixtures" / "tiny"
NAMES = sorted(folder.name for folder in TINY.iterdir())
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
CHATML = (
    "{% for message in messages %}<s>{{ message['role'] + '\n' + message['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@cache
def default_tokenizer() -> Tokenizer:
    """The default model's; downloads it at first use."""
    return resolve_and_load("smollm2-135m-instruct", dtype="float32", cache_dir=default_cache_dir()).tokenizer


def byte_characters() -> list[str]:
    """GPT-2's characters for the 256 bytes, in the order of the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def added(index: int, text: str, **changes: Any) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": text, **plain, **changes}


def byte_level_json(words: list[str] = (), special: list[str] = SPECIAL, limit: int = 256) -> dict[str, Any]:  # type: ignore[assignment]
    """A byte-level `tokenizer.json`: special tokens, the bytes (the first `limit` of them), then two-letter words."""
    characters = byte_characters()
    texts = [
        *special,
        *[characters[byte] for byte in [*range(32, 127), 10, *range(10), *range(11, 32), *range(127, 256)]],
    ]
    vocab = {text: index for index, text in enumerate([*texts[: limit + len(special)], *words])}
    return {
        "version": "1.0",
        "added_tokens": [added(index, text) for index, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [[word[0], word[1:]] for word in words]},
    }


def byte_level(**changes: Any) -> Tokenizer:
    """A byte-level tokenizer; `changes` are those of `TokenizerSpec`."""
    fields = {
        "json_text": json.dumps(byte_level_json(["ab", "Ġa"])),
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "chat_template": CHATML,
        "add_bos": False,
        "marks_spaces": False,
        "strips_leading_space": False,
    }
    return Tokenizer(TokenizerSpec(**{**fields, **changes}))


def tiny_checkpoint(name: str, parent: Path, **config_changes: Any) -> Path:
    """A copy of one of the random checkpoints, with a tokenizer of at most 128 tokens."""
    folder = parent / name
    shutil.copytree(TINY / name, folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_json(limit=100)))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **config_changes}))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor under its Hugging Face name."""
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture: rows (i, i + D/2) become (2i, 2i + 1)."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_freqs: np.ndarray | None = None,
    **fields: Any,
) -> Path:
    """A tiny checkpoint as llama.cpp would convert it. `fields` are more metadata, or None to leave one out."""
    raw = json.loads((folder / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(str(path), architecture)
    tokens = sorted(byte_level_json(limit=100)["model"]["vocab"], key=byte_level_json(limit=100)["model"]["vocab"].get)
    metadata: dict[str, Any] = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": raw["rope_parameters"]["rope_theta"],
    } | fields
    for name, value in metadata.items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{name}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(tokens) - 4))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, array in tensors_of(folder).items():
        permuted = architecture == "llama" and ("q_proj" in name or "k_proj" in name)
        heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        stored = np.ascontiguousarray(_interleaved(array, heads) if permuted else array)
        short = name
        for long, brief in _GGUF_NAMES.items():
            short = short.replace(long, brief, 1)
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(short, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
