"""Conversations to token ids, through the model's own Jinja template in a sandbox. Called by `api/translate.py`.

Special tokens count only where the template writes them. Their spelling inside a message is swapped for a random marker
before rendering and put back, as literal text, after the template's own special tokens have been cut out. BPE never
merges across a special token, so cutting there changes no id.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.tokenizer import Tokenizer

MAX_RENDERED_CHARACTERS = 32 << 20


class ChatTemplateError(ValueError):
    """The template refused the conversation, or cannot be used; the message says why."""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template does not compile: {error}") from error


class ChatEncoder:
    """Renders and encodes conversations for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        texts = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation.

        Args:
            messages: role, content and so on, as the template expects them.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end with exactly the last message's content, its turn left open.
            template: used in place of the model's own.
            template_kwargs: more variables for the template.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses or fails.
        """
        source = template or self._tokenizer.chat_template
        if source is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions or give a chat_template")
        nonce = secrets.token_hex(16)
        markers: dict[str, str] = {}
        safe = [self._mask(dict(message), nonce, markers) for message in messages]
        final = None
        if continue_final_message:
            final = f"\ue000{nonce}-final\ue001"
            content = safe[-1]["content"] or ""
            safe[-1] = {**safe[-1], "content": final}
            markers[final] = _unmask(content, markers)
        variables = self._mask(dict(template_kwargs or {}), nonce, markers)
        rendered = self._render(_compile(source), safe, add_generation_prompt, variables)
        if final is not None:
            before, found, _ = rendered.rpartition(final)
            if not found:
                raise ChatTemplateError("the chat template does not show the final message, so it cannot be continued")
            rendered = before + found
        return self._encode_rendered(rendered, markers)

    def _render(
        self, template: jinja2.Template, messages: Sequence[Any], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        special = self._tokenizer
        eos = special.eos_token_ids[0] if special.eos_token_ids else None
        context = {
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": "" if special.bos_token_id is None else special.decode([special.bos_token_id]),
            "eos_token": "" if eos is None else special.decode([eos]),
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError("the chat template writes too much")
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the conversation: {error.message}") from error
        except Exception as error:  # a template is a program of its own: whatever it raises is its fault
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from error
        return "".join(pieces)

    def _mask(self, value: Any, nonce: str, markers: dict[str, str]) -> Any:
        """Swap special tokens' spelling in every string of `value` for markers."""
        if isinstance(value, str):
            return self._special.sub(lambda match: _marker(match[0], nonce, markers), value) if self._special else value
        if isinstance(value, Mapping):
            return {key: self._mask(item, nonce, markers) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mask(item, nonce, markers) for item in value]
        return value

    def _encode_rendered(self, rendered: str, markers: Mapping[str, str]) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(rendered) if self._special else ():
            ids.extend(self._encode_text(rendered[start : match.start()], markers))
            ids.append(self._tokenizer.special_tokens[match[0]])
            start = match.end()
        ids.extend(self._encode_text(rendered[start:], markers))
        return ids

    def _encode_text(self, text: str, markers: Mapping[str, str]) -> list[int]:
        if not text:
            return []
        return self._tokenizer.encode(_unmask(text, markers), parse_special=False, add_bos=False)


def _marker(text: str, nonce: str, markers: dict[str, str]) -> str:
    marker = f"\ue000{nonce}-{len(markers)}\ue001"
    markers[marker] = text
    return marker


def _unmask(text: str, markers: Mapping[str, str]) -> str:
    for marker, original in markers.items():
        text = text.replace(marker, original)
    return text
