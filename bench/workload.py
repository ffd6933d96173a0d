"""What is sent: the body of each request of a measurement. Built by the command lines, read by `bench/load.py`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from bench.words import random_prompt

Route = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, ready to be sent. `label` names the group in which it is counted."""

    path: str
    body: bytes
    label: str = ""
    num_words: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind, each with a prompt of its own.

    Attributes:
        prompt_len: words of the prompt, one token each (`bench/words.py`). max_tokens: of the answer.
        ignore_eos: ask for exactly max_tokens tokens; not every server knows the field.
        extra: fields that are added to each body.
    """

    model: str
    prompt_len: int = 64
    max_tokens: int = 64
    route: Route = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def request(self, rng: Random, label: str = "", priority: float | None = None) -> PlannedRequest:
        """A request with a new prompt."""
        text = random_prompt(rng, self.prompt_len)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.route == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.ignore_eos:
            body["ignore_eos"] = True
        if priority is not None:
            body["priority"] = priority
        body.update(self.extra)
        path = "/v1/chat/completions" if self.route == "chat" else "/v1/completions"
        return PlannedRequest(path, json.dumps(body).encode(), label, self.prompt_len, self.max_tokens)
