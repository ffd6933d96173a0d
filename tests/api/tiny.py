"""A tiny byte-level tokenizer, and a server around the fake engine that uses it. For tests of the generation routes.

Token i below 256 is the byte i; then come a few merged tokens and the special ones of a ChatML template. So a test can
say which bytes an answer consists of, and split characters wherever it likes.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from api.app import model_routes
from api.config import ServerConfig
from api.config_loading import resolve
from api.server_state import Limits, ModelFacts
from model.tokenizer import Tokenizer, TokenizerSpec, _byte_of_character
from scheduler import Request
from tests.api.fake_engine import FakeEngine, Script
from tests.api.serving import Served, served

MODEL = "tiny"
MERGED = ("th", "he", "Ġt", "an", "Ġa")
SPECIAL = ("<|im_start|>", "<|im_end|>")
START, END = 256 + len(MERGED), 257 + len(MERGED)
VOCAB_SIZE = END + 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Built in memory, in the format of `tokenizer.json`."""
    characters = {byte: character for character, byte in _byte_of_character().items()}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary |= {text: 256 + i for i, text in enumerate(MERGED)}
    added = [
        {"id": START + i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i, text in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [list(text) for text in MERGED]},
    }
    return Tokenizer(
        TokenizerSpec(
            json_text=json.dumps(spec),
            bos_token_id=None,
            eos_token_ids=(END,),
            chat_template=TEMPLATE,
            add_bos=False,
            marks_spaces=False,
            strips_leading_space=False,
        )
    )


def saying(*texts: str | bytes, end: bool = True) -> Script:
    """Choice i says texts[i] (the last one from then on) byte by byte, then ends its turn or starts over."""
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]

    def script(request: Request, index: int) -> int:
        choice = getattr(request.sampling, "choice", 0)
        tokens = [*encoded[min(choice, len(encoded) - 1)], *([END] if end else [])]
        return tokens[index % len(tokens)]

    return script


@contextlib.contextmanager
def serving(
    script: Script | None = None,
    *,
    limits: Limits | None = None,
    config: dict[str, Any] | None = None,
    keys: Sequence[str] | None = None,
    **engine_options: Any,
) -> Iterator[Served]:
    """A server on a free port whose engine follows `script`; `engine_options` are the fake engine's."""
    options = {"vocab_size": VOCAB_SIZE, **engine_options}
    flush: list[Any] = []
    engine = FakeEngine(script or saying("hello"), on_step_done=lambda: flush[0](), **options)
    settings: ServerConfig = resolve(config or {})
    with served(config=settings, engine=engine, limits=limits, client_keys=keys, routes=model_routes(), attach=False) as it:
        flush.append(it.state.bridge.flush)
        it.state.attach(cast(Any, engine), tiny_tokenizer(), ModelFacts(MODEL, "fake"))
        engine.start()
        yield it
