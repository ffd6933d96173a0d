"""A tiny byte-level tokenizer, and a server around the fake engine that uses it. For tests of the generation routes.

Token i below 256 is the byte i; then come a few merged tokens and the special ones of a ChatML template. So a test can
say which bytes an answer consists of, and split characters wherever it likes.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from api.app import model_routes
from api.config_loading import resolve
from api.server_state import Limits, ModelFacts, ServerState
from model.tokenizer import Tokenizer, TokenizerSpec, _byte_of_character
from scheduler import Request, SchedulerConfig
from tests.api.fake_engine import SMALL, FakeEngine, Script
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
    settings: dict[str, Any] | None = None,
    limits: Limits | None = None,
    scheduler: SchedulerConfig = SMALL,
    step_secs: float = 0.0,
    keys: Sequence[str] | None = None,
) -> Iterator[Served]:
    """A server on a free port whose engine follows `script`.

    Args:
        settings: keys of the configuration. limits: of the server. scheduler, step_secs: of the engine.
        keys: of clients.
    """
    state: list[ServerState] = []
    engine = FakeEngine(
        script or saying("hello"),
        config=scheduler,
        vocab_size=VOCAB_SIZE,
        step_secs=step_secs,
        on_step_done=lambda: state[0].bridge.flush(),
    )
    options = {"engine": engine, "limits": limits, "routes": model_routes(), "attach": False, "client_keys": keys}
    with served(config=resolve(settings or {}), **options) as server:
        state.append(server.state)
        server.state.attach(cast(Any, engine), tiny_tokenizer(), ModelFacts(MODEL, "fake"))
        engine.start()
        yield server


def parse_events(text: str) -> list[dict[str, Any] | str]:
    """The events of a stream: decoded JSON, or `[DONE]`. Fails on anything that is not an event."""
    events: list[dict[str, Any] | str] = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
        events.append("[DONE]" if block == "data: [DONE]" else json.loads(block[6:]))
    return events


def chat(content: str = "x", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def completion(prompt: Any = "x", **fields: Any) -> dict[str, Any]:
    """The body of a completion request."""
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}


def metric(server: Served, name: str, **labels: str) -> float:
    """The value of one series, 0 if there is none."""
    body, _ = server.state.metrics.render()
    wanted = {"model_name": MODEL, **labels}
    for line in body.decode().splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == f"twinmesh_{name}" and all(f'{k}="{v}"' in head for k, v in wanted.items()):
            return float(value)
    return 0.0


def wait_until(condition: Callable[[], bool], within_secs: float = 5.0) -> None:
    """Fail unless `condition` comes true in time."""
    deadline = time.monotonic() + within_secs
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def is_idle(server: Served) -> bool:
    """Whether nothing runs or waits, and no page is held."""
    stats = server.engine.stats().scheduler
    return (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
