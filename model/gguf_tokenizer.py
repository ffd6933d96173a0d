"""A `tokenizer.json` from a GGUF header. Called by `model/weights/gguf.py`.

Knows byte-level BPE (`gpt2`) with the pre-tokenizers listed here, and SentencePiece BPE (`llama`). Another
pre-tokenizer is refused by name: a wrong split gives wrong ids, and nothing would say so.
"""

import json
from typing import Any

from model.errors import UnsupportedModelError
from model.tokenizer import TokenizerSpec

CONTROL, USER_DEFINED, BYTE = 3, 4, 6

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        _byte_level(use_regex=False),
    ]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}


def tokenizer_spec(metadata: dict[str, Any]) -> TokenizerSpec:
    """The tokenizer that a GGUF header describes. Raises UnsupportedModelError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        body = _byte_level_bpe(metadata)
    elif kind == "llama":
        body = _sentencepiece_bpe(metadata)
    else:
        raise UnsupportedModelError(f"GGUF tokenizer {kind!r} is not supported; known: gpt2, llama")
    body["added_tokens"] = _added_tokens(metadata)
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return TokenizerSpec(
        json_text=json.dumps({"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **body}),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        strips_leading_space=kind == "llama",
    )


def _added_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    return [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _bpe(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **changes,
    }


def _byte_level_bpe(metadata: dict[str, Any]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModelError(f"GGUF pre-tokenizer {pre!r} is not supported; known: {known}")
    vocab = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
    normalizer = {"type": "NFC"} if pre == "qwen2" else None
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre == "llama-bpe"),
    }


def _sentencepiece_bpe(metadata: dict[str, Any]) -> dict[str, Any]:
    """SentencePiece merges two neighbours into the piece of the best score; as BPE, that is a merge list by score."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {text: index for index, text in enumerate(tokens)}
    ranked: list[tuple[float, int, list[str]]] = []
    for text, index in vocab.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], [left, right]))
    ranked.sort(key=lambda entry: entry[:2])
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": _bpe(
            vocab, [merge for *_, merge in ranked], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        ),
    }
