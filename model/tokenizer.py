"""Text to ids and back, on the `tokenizers` library; built from a GGUF header or a Hugging Face folder.

`api/` encodes prompts and takes tokens apart into bytes. The library is told to take the spelling of special tokens as
ordinary text; where it should mean the token, the text is cut there first. BPE never merges across a special token, so
the ids are those that the library would give.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from model.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Everything that a tokenizer is made from; stored beside a converted checkpoint.

    Attributes:
        json_text: a `tokenizer.json`.
        bos_token_id: None when the tokenizer has no start token, whatever the model's configuration says.
        eos_token_ids: ids that end a turn; the first is the one that templates call `eos_token`.
        add_bos: whether a plain prompt starts with the start token.
        marks_spaces: SentencePiece: ▁ stands for a space and <0x0A> for a byte; else byte-level (GPT-2).
        strips_leading_space: a text is encoded with a space put before it, which decoding takes away again.
    """

    json_text: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    add_bos: bool
    marks_spaces: bool
    strips_leading_space: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})


def spec_from_folder(folder: Path, bos_token_id: int | None, eos_token_ids: Sequence[int]) -> TokenizerSpec:
    """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Args:
        folder: a Hugging Face folder.
        bos_token_id: of the model's configuration; used when `tokenizer_config.json` is missing.
        eos_token_ids: of the model's configuration; the tokenizer's own comes before them.

    Raises:
        UnsupportedModelError: no tokenizer.json, or one of a kind that is not implemented.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{folder.name} has no tokenizer.json")
    text = path.read_text(encoding="utf-8")
    settings = _settings(folder)
    try:
        probe = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedModelError(f"{folder.name}/tokenizer.json cannot be used: {error}") from error
    if settings is not None:
        bos_token_id = _id_of(probe, settings.get("bos_token"))
        own_eos = _id_of(probe, settings.get("eos_token"))
        eos_token_ids = [*([] if own_eos is None else [own_eos]), *eos_token_ids]
    settings = settings or {}
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = bos_token_id is not None and probe.encode("a").ids[:1] == [bos_token_id]
    marks_spaces, strips = _decoder_rules(json.loads(text), folder.name)
    return TokenizerSpec(
        json_text=text,
        bos_token_id=bos_token_id,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        chat_template=_chat_template(folder, settings),
        add_bos=bool(add_bos),
        marks_spaces=marks_spaces,
        strips_leading_space=strips,
    )


def _settings(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _id_of(probe: tokenizers.Tokenizer, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return None if text is None else probe.token_to_id(text)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _decoder_rules(parsed: dict[str, Any], name: str) -> tuple[bool, bool]:
    """(marks_spaces, strips_leading_space) of a `tokenizer.json`, from its decoder."""
    decoder = parsed.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return False, False
    if "Metaspace" in kinds:
        step = steps[kinds.index("Metaspace")]
        return True, step.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return True, "Strip" in kinds
    raise UnsupportedModelError(f"{name}/tokenizer.json decodes with {kinds[0]!r}; known: byte-level, SentencePiece")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: those that print stand for themselves, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _first_space_rule(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a `tokenizer.json` that put a space before the first word of a whole text only; may be changed."""
    pre = parsed.get("pre_tokenizer") or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    return [step for step in steps if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"]


class Tokenizer:
    """One vocabulary. Safe to use from several threads; nothing here mutates after construction.

    Attributes:
        vocab_size: ids from here on are never valid.
        special_tokens: text → id of the tokens that structure a conversation.
        strips_leading_space: see `TokenizerSpec`; a decoded text loses the first token's leading space.
    """

    def __init__(self, spec: TokenizerSpec):
        self.spec = spec
        self._literal = self._instance(spec.json_text)
        parsed = json.loads(spec.json_text)
        self._continuing = self._literal
        if steps := _first_space_rule(parsed):
            for step in steps:
                step["prepend_scheme"] = "never"
            self._continuing = self._instance(json.dumps(parsed))
        vocabulary = self._literal.get_vocab(with_added_tokens=True)
        self._added = {int(i): token for i, token in self._literal.get_added_tokens_decoder().items()}
        self._text_of = {token_id: text for text, token_id in vocabulary.items()}
        self.vocab_size = max(self._text_of) + 1
        self.special_tokens = {token.content: i for i, token in sorted(self._added.items()) if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._special = self._special_pattern()
        self.bos_token_id = spec.bos_token_id
        self.eos_token_ids = spec.eos_token_ids
        self.chat_template = spec.chat_template
        self.strips_leading_space = spec.strips_leading_space
        self._byte_of = _byte_of_character()

    @staticmethod
    def _instance(json_text: str) -> tokenizers.Tokenizer:
        instance = tokenizers.Tokenizer.from_str(json_text)
        instance.encode_special_tokens = True  # their spelling is ordinary text to it
        instance.no_truncation()
        instance.no_padding()
        return instance

    def _special_pattern(self) -> re.Pattern[str]:
        """Matches a special token's spelling, as its only group, and the white space that it swallows."""
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for text, token_id in self.special_tokens.items():
            token = self._added[token_id]
            kinds.setdefault((token.lstrip, token.rstrip), []).append(text)
        parts = []
        for (left, right), texts in kinds.items():
            spelling = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
            parts.append(f"{r'\s*' if left else ''}(?:{spelling}){r'\s*' if right else ''}")
        return re.compile("|".join(parts) if parts else r"(?!)")

    @cached_property
    def digest(self) -> str:
        """A hash of the vocabulary, to compare two servers' tokenizers."""
        return hashlib.sha256(self.spec.json_text.encode()).hexdigest()

    def encode(
        self, text: str, *, parse_special: bool, add_bos: bool | None = None, continues: bool = False
    ) -> list[int]:
        """Ids of a text.

        Args:
            text: any text; a lone surrogate is refused.
            parse_special: whether the spelling of a special token means that token.
            add_bos: whether to start with the start token; None for what the model expects.
            continues: the text comes after a special token (of use without `parse_special`).

        Raises:
            ValueError: the text is not encodable as UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("the text contains a lone surrogate") from error
        ids = self._encode_special(text) if parse_special else self._encode_literal(text, continues)
        wants_bos = self.spec.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def split_special(self, text: str) -> Iterator[str | int]:
        """The text cut at its special tokens: ids of these, and the texts between."""
        start = 0
        for match in self._special.finditer(text):
            if match.start() > start:
                yield text[start : match.start()]
            yield self._id_of_match(match[0])
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _encode_special(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.split_special(text):
            ids.extend([piece] if isinstance(piece, int) else self._encode_literal(piece, continues=bool(ids)))
        return ids

    def _id_of_match(self, matched: str) -> int:
        token_id = self.special_tokens.get(matched)
        return self.special_tokens[matched.strip()] if token_id is None else token_id

    def _encode_literal(self, text: str, continues: bool) -> list[int]:
        instance = self._continuing if continues else self._literal
        return instance.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes(token_id) for token_id in ids).decode("utf-8", errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; an added token's are its spelling, an unused id's are empty."""
        text = self.token_text(token_id)
        if token_id in self._added:
            return text.encode()
        if self.spec.marks_spaces:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return text.replace("▁", " ").encode()
        try:
            return bytes(self._byte_of[character] for character in text)
        except KeyError:
            return text.encode()

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it; an unused id's is empty."""
        return self._text_of.get(token_id, "")

    def is_special(self, token_id: int) -> bool:
        """Whether the token structures a conversation and is left out of answers."""
        return token_id in self._special_ids
