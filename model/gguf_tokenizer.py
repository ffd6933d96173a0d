"""A `tokenizer.json` from a GGUF header. Called by `model/weights/gguf.py`.

Knows byte-level BPE (`gpt2`) with the pre-tokenizers listed here, and SentencePiece BPE (`llama`). Another
pre-tokenizer is refused by name: a wrong split gives wrong ids, and nothing would say so. `Tokenizer` turns ids into
bytes by itself, so no decoder is written.
"""

import json
from typing import Any

from model.errors import UnsupportedModelError
from model.tokenizer import TokenizerSpec

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# End-of-turn tokens by their spelling: many files name only one of those that a model ends with.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> list[dict[str, Any]]:
    """Cut at the first pattern, each piece at the second, and so on."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ] + [_byte_level(use_regex=False)]


# By llama.cpp's name of the pre-tokenizer.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "llama-v3": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split(_QWEN2_SPLIT),
}
_EMPTY = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": None}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


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
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    return TokenizerSpec(
        json_text=json.dumps({**_EMPTY, **body}),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_ends_of_turn(metadata, body["added_tokens"]),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        marks_spaces=kind == "llama",
        strips_leading_space=kind == "llama" and bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )


def _ends_of_turn(metadata: dict[str, Any], added_tokens: list[dict[str, Any]]) -> tuple[int, ...]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [token["id"] for token in added_tokens if token["special"] and token["content"] in _ENDS]
    return tuple(dict.fromkeys([int(token) for token in named if token is not None] + known))


def _tokens(metadata: dict[str, Any]) -> list[tuple[int, str, int]]:
    """(id, text, kind) of the tokens in use: rows that only pad the embedding table are left out."""
    texts = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    return [(i, text, kind) for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind != UNUSED]


def _added_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
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
        for index, text, kind in _tokens(metadata)
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
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModelError(f"GGUF pre-tokenizer {pre!r} is not supported; known: {known}")
    vocab = {text: index for index, text, _ in _tokens(metadata)}
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or []]
    normalizer = {"type": "NFC"} if "qwen" in pre else None
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "model": _bpe(vocab, merges, ignore_merges=pre in _LLAMA3),
    }


def _sentencepiece_bpe(metadata: dict[str, Any]) -> dict[str, Any]:
    """SentencePiece merges two neighbours into the piece of the best score; as BPE, that is a merge list by score.

    Only normal pieces take part: the spelling of a control token must never be merged into that token.
    """
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {text: index for index, text, _ in _tokens(metadata)}
    normal = {text for _, text, kind in _tokens(metadata) if kind == NORMAL}
    ranked: list[tuple[float, int, list[str]]] = []
    for text in normal:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[vocab[text]], vocab[left], [left, right]))
    ranked.sort(key=lambda entry: (entry[0], entry[1], entry[2][0]))
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "model": _bpe(vocab, [pair for *_, pair in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }
