"""Text to ids and back: against Hugging Face's ids for the default model, and rules on tokenizers made by hand."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UnsupportedModelError
from model.gguf_tokenizer import tokenizer_spec
from model.tokenizer import Tokenizer, spec_from_folder

from .checkpoints import added, byte_level, byte_level_json, default_tokenizer

REFERENCE = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json").read_text())
# SmolLM2 knows no token for some control characters, nor for the first byte of unassigned planes; it drops them.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF), max_size=30)


# The default model


@pytest.mark.parametrize("entry", REFERENCE, ids=range(len(REFERENCE)))
def test_ids_equal_those_of_transformers(entry):
    assert default_tokenizer().encode(entry["prompt"], parse_special=True) == entry["prompt_ids"]


def test_digits_are_single_tokens():
    tokenizer = default_tokenizer()
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("20241", parse_special=False)] == [
        b"2",
        b"0",
        b"2",
        b"4",
        b"1",
    ]


@given(texts)
def test_bytes_of_the_ids_are_the_text(text):
    tokenizer = default_tokenizer()
    ids = tokenizer.encode(text, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_literal_unless_parsed():
    tokenizer = default_tokenizer()
    text = "a<|im_end|>b"
    assert 2 in tokenizer.encode(text, parse_special=True)
    ids = tokenizer.encode(text, parse_special=False)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == text


def test_facts_about_the_default_model():
    tokenizer = default_tokenizer()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_tokens["<|im_end|>"] == 2
    assert tokenizer.eos_token_ids[0] == 2
    assert tokenizer.encode("", parse_special=False) == []
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_several_threads_may_encode():
    tokenizer = default_tokenizer()
    pairs = [(f"<|im_start|>{i} words and <|im_end|>", bool(i % 2)) for i in range(64)]
    expected = [tokenizer.encode(text, parse_special=special) for text, special in pairs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: tokenizer.encode(pair[0], parse_special=pair[1]), pairs))
    assert found == expected


# Rules


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_refused(text):
    for parse_special in (False, True):
        with pytest.raises(ValueError, match="surrogate"):
            byte_level().encode(text, parse_special=parse_special)


def test_the_start_token_comes_once():
    tokenizer = byte_level(add_bos=True)
    plain = tokenizer.encode("ab", parse_special=False, add_bos=False)
    assert tokenizer.encode("ab", parse_special=False) == [1, *plain]
    assert tokenizer.encode("<s>ab", parse_special=True) == [1, *plain]
    assert byte_level().encode("ab", parse_special=False, add_bos=True) == [1, *plain]
    assert tokenizer.encode("", parse_special=False) == [1]


def test_a_part_of_a_character_decodes_to_a_replacement():
    tokenizer = byte_level()
    ids = tokenizer.encode("é", parse_special=False)
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "�"
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]


def test_special_tokens_may_swallow_spaces():
    body = byte_level_json()
    body["added_tokens"][3] = added(3, "<|end|>", rstrip=True)
    body["added_tokens"][2] = added(2, "</s>", lstrip=True)
    tokenizer = byte_level(json_text=json.dumps(body))
    assert tokenizer.encode("a<|end|> \nb", parse_special=True) == tokenizer.encode("a<|end|>b", parse_special=True)
    assert tokenizer.encode("a </s>", parse_special=True) == tokenizer.encode("a</s>", parse_special=True)
    assert tokenizer.encode("a <s>", parse_special=True) != tokenizer.encode("a<s>", parse_special=True)


def test_added_tokens_that_are_not_special_stay_tokens():
    body = byte_level_json(["<t>"])
    index = body["model"]["vocab"]["<t>"]
    body["model"]["merges"] = []
    body["added_tokens"].append(added(index, "<t>", special=False))
    tokenizer = byte_level(json_text=json.dumps(body))
    assert tokenizer.encode("<t>", parse_special=False) == [index]
    assert not tokenizer.is_special(index)


# Hugging Face folders


def _folder(tmp_path: Path, body: dict, settings: dict | None = None) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_folder_settings_name_the_start_and_end_tokens(tmp_path):
    settings = {"bos_token": None, "eos_token": {"content": "<|end|>"}, "chat_template": "x"}
    spec = spec_from_folder(_folder(tmp_path, byte_level_json(), settings), 1, [2])
    assert (spec.bos_token_id, spec.eos_token_ids, spec.chat_template, spec.add_bos) == (None, (3, 2), "x", False)


def test_a_folder_without_settings_takes_those_of_the_model(tmp_path):
    spec = spec_from_folder(_folder(tmp_path, byte_level_json()), 1, [2])
    assert (spec.bos_token_id, spec.eos_token_ids, spec.chat_template) == (1, (2,), None)


def test_the_template_file_wins_and_a_list_means_its_default(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = _folder(tmp_path, byte_level_json(), {"chat_template": named})
    assert spec_from_folder(folder, 1, [2]).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert spec_from_folder(folder, 1, [2]).chat_template == "file"


def test_a_post_processor_that_adds_the_start_token_is_noticed(tmp_path):
    body = byte_level_json()
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    body["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    assert spec_from_folder(_folder(tmp_path, body), 1, [2]).add_bos
    assert not spec_from_folder(_folder(tmp_path, body, {"bos_token": "<s>", "add_bos_token": False}), 1, [2]).add_bos


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    body = byte_level_json()
    body["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        spec_from_folder(_folder(tmp_path, body), 1, [2])
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json cannot be used"):
        spec_from_folder(tmp_path, 1, [2])


def _metaspace(scheme: str) -> dict:
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"])}
    return {
        "version": "1.0",
        "added_tokens": [added(index, text) for text, index in vocab.items() if index < 3],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"], ["▁", "b"]], "unk_token": "<unk>"},
    }


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_is_put_before_the_first_word_as_the_vocabulary_says(scheme, tmp_path):
    tokenizer = Tokenizer(spec_from_folder(_folder(tmp_path, _metaspace(scheme)), 1, [2]))
    tokenizer_library = tokenizer._instance(json.dumps(_metaspace(scheme)))
    tokenizer_library.encode_special_tokens = False
    for text in ("a b", "<s>a b", "a</s>b", "a</s> b", " a", ""):
        assert (
            tokenizer.encode(text, parse_special=True) == tokenizer_library.encode(text, add_special_tokens=False).ids
        )
    ids = tokenizer.encode("a b", parse_special=False)
    assert tokenizer.decode(ids) == "a b"
    assert tokenizer.token_bytes(6) == b" a"


# GGUF headers


def _gguf(model: str = "gpt2", pre: str | None = "gpt-2", **fields) -> dict:
    vocab = byte_level_json(["ab"])["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return metadata | ({"tokenizer.ggml.pre": pre} if pre else {})


def _pieces(pre: str | None, text: str) -> list[str]:
    """How a pre-tokenizer cuts a text: with every merge of bytes in the vocabulary, words would be whole."""
    tokenizer = Tokenizer(tokenizer_spec(_gguf(pre=pre)))
    return [piece.replace("Ġ", " ") for piece, _ in tokenizer._literal.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 12345", " OK", "!!"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", " OK", "!!"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", " OK", "!!"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", " OK", "!!"]),
        ("default", ["it", "'", "s", " ", "123", "45", " OK", "!!"]),
        (None, ["it", "'", "s", " ", "123", "45", " OK", "!!"]),
    ],
)
def test_pre_tokenizers(pre, pieces):
    assert _pieces(pre, "it's 12345 OK!!") == pieces


def test_an_unknown_pre_tokenizer_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'tekken'"):
        tokenizer_spec(_gguf(pre="tekken"))
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        tokenizer_spec(_gguf(model="bert"))


def test_rows_that_pad_the_table_are_no_tokens():
    metadata = _gguf()
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    assert Tokenizer(tokenizer_spec(metadata)).vocab_size == Tokenizer(tokenizer_spec(_gguf())).vocab_size


def test_end_tokens_that_a_header_does_not_name():
    metadata = _gguf(eot_token_id=0)
    metadata["tokenizer.ggml.tokens"][3] = "<|eot_id|>"
    assert tokenizer_spec(metadata).eos_token_ids == (2, 0, 3)


@pytest.mark.parametrize(
    ("pre", "given", "expected"), [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)]
)
def test_whether_a_prompt_begins_with_the_start_token(pre, given, expected):
    fields = {} if given is None else {"add_bos_token": given}
    assert tokenizer_spec(_gguf(pre=pre, **fields)).add_bos is expected


# SentencePiece in a GGUF header

PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "ca", "<", "s", ">", "s>", "▁▁"]


def _sentencepiece(scores: list[float], **fields) -> Tokenizer:
    control = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *bytes_, *PIECES],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [0.0] * (3 + 256) + scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return Tokenizer(tokenizer_spec(metadata))


def _merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE (Kudo and Richardson, arXiv:1808.06226): again and again the first pair of the best score."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_sentencepiece_merges_by_score():
    rng = random.Random(5)
    for _ in range(30):
        scores = [float(-rank) for rank in rng.sample(range(len(PIECES)), len(PIECES))]
        tokenizer = _sentencepiece(scores)
        by_piece = dict(zip(PIECES, scores, strict=True))
        for _ in range(20):
            text = "".join(rng.choices("abc ", k=rng.randrange(1, 12)))
            ids = tokenizer.encode(text, parse_special=False, add_bos=False)
            expected = _merge_by_score("▁" + text.replace(" ", "▁"), by_piece)
            assert [tokenizer.token_text(i) for i in ids] == expected, (text, by_piece)
            assert tokenizer.decode(ids) == text


def test_sentencepiece_rules():
    tokenizer = _sentencepiece([-float(i) for i in range(len(PIECES))])
    assert tokenizer.encode("ab", parse_special=False)[0] == tokenizer.bos_token_id == 1
    ids = tokenizer.encode("a é\n", parse_special=False, add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b" ", b"\xc3", b"\xa9", b"\n"]
    assert tokenizer.decode(ids) == "a é\n"
    assert tokenizer.decode(ids[1:]) == "é\n"
    assert tokenizer.strips_leading_space
    whole = _sentencepiece([-1.0] * len(PIECES), add_space_prefix=False)
    assert not whole.strips_leading_space
    assert whole.decode(whole.encode(" a", parse_special=False, add_bos=False)) == " a"


def test_typed_control_tokens_are_never_merged_into_their_ids():
    tokenizer = _sentencepiece([-float(i) for i in range(len(PIECES))])
    ids = tokenizer.encode("<s>", parse_special=False, add_bos=False)
    assert [tokenizer.token_text(i) for i in ids] == ["▁", "<", "s>"]
    assert tokenizer.encode("<s>", parse_special=True) == [1]
