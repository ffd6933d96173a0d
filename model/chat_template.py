"""Conversations to token ids, through the model's own Jinja template in a sandbox. Called by `api/translate.py`.

Special tokens count only where the template writes them. Their spelling inside a message is swapped for a random number
before rendering and put back, as literal text, after the template's own special tokens have been cut out. BPE never
merges across a special token, so cutting there changes no id.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import jinja2

from model.template_sandbox import TemplateLimits, compile_template, render
from model.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 1 << 20


class ChatTemplateError(ValueError):
    """The template refused the conversation, or cannot be used; the message says why."""


class ChatEncoder:
    """Renders and encodes conversations for one tokenizer. Thread-safe.

    `limits` bound one rendering. A conversation of n characters costs time in proportion to n.
    """

    def __init__(self, tokenizer: Tokenizer, limits: TemplateLimits | None = None):
        self._tokenizer = tokenizer
        self._limits = limits or TemplateLimits()
        self._spellings = _Spellings(list(tokenizer.special_tokens))

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
            ChatTemplateError: the model has no template, or the template refuses, fails, or goes beyond the limits.
        """
        source = template or self._tokenizer.chat_template
        if source is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions or give a chat_template")
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other")
        mask = _Mask(self._spellings)
        safe = [mask.hide(dict(message)) for message in messages]
        final = None
        if continue_final_message:
            content = messages[-1].get("content") or "" if messages else None
            if not isinstance(content, str):
                raise ChatTemplateError("continue_final_message needs a last message whose content is text")
            final = mask.marker(content)
            safe[-1]["content"] = final
        variables = {
            **mask.hide(dict(template_kwargs or {})),
            "messages": safe,
            "add_generation_prompt": add_generation_prompt,
            **self._special_variables(),
        }
        rendered = self._render(source, variables)
        if final is not None:
            before, found, _ = rendered.rpartition(final)
            if not found:
                raise ChatTemplateError("the chat template does not show the final message, so it cannot be continued")
            rendered = before + found
        return self._encode_rendered(rendered, mask)

    def _special_variables(self) -> dict[str, str]:
        tokenizer = self._tokenizer
        return {
            "bos_token": "" if tokenizer.bos_token_id is None else tokenizer.token_text(tokenizer.bos_token_id),
            "eos_token": tokenizer.token_text(tokenizer.eos_token_ids[0]) if tokenizer.eos_token_ids else "",
        }

    def _render(self, source: str, variables: dict[str, Any]) -> str:
        code = _compile(source)
        try:
            return render(code, variables, self._limits)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the conversation: {error.message}") from error
        except Exception as error:  # a template is a program of its own: whatever it raises is its fault
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from error

    def _encode_rendered(self, rendered: str, mask: "_Mask") -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(self._tokenizer.split_special(rendered)):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                text = mask.show(piece)
                ids.extend(self._tokenizer.encode(text, parse_special=False, add_bos=False, continues=number > 0))
        return ids


@lru_cache(maxsize=16)
def _compile(source: str) -> CodeType:
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise ChatTemplateError("the chat template is too long")
    try:
        return compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
    except Exception as error:  # deep nesting and the like: Jinja's and Python's compilers raise many types
        raise ChatTemplateError(f"the chat template does not compile: {type(error).__name__}") from error


class _Spellings:
    """Finds the spelling of special tokens in text."""

    def __init__(self, texts: Sequence[str]):
        ordered = sorted(texts, key=len, reverse=True)
        self.whole = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        self._starts = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, self._starts), default=0)

    def unfinished(self, text: str) -> int:
        """How many characters at the end of `text` could begin a special token that the next text completes."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._starts), 0)


class _Mask:
    """Swaps special tokens' spelling for numbers that nobody can guess, and back. One per conversation.

    Digits survive what templates do to text: trimming, changing case, writing as JSON.
    """

    def __init__(self, spellings: _Spellings):
        self._spellings = spellings
        self._nonce = f"{secrets.randbelow(10**18):018d}"
        self._number_of: dict[str, int] = {}
        self._texts: list[str] = []
        self._marker = re.compile(self._nonce + r"(\d{6})")

    def marker(self, text: str) -> str:
        """What stands for `text` until `show`."""
        number = self._number_of.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
        return f"{self._nonce}{number:06d}"

    def hide(self, value: Any) -> Any:
        """A copy of `value` whose strings, however deep, spell no special token, nor begin one at their end."""
        if isinstance(value, str):
            hidden = self._spellings.whole.sub(lambda match: self.marker(match[0]), value)
            size = self._spellings.unfinished(hidden)
            return hidden[:-size] + self.marker(hidden[-size:]) if size else hidden
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """Put the spellings back."""
        return self._marker.sub(lambda match: self._texts[int(match[1])], text)
