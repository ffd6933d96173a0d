"""What a stream may look like, for every combination of options; and that it says what the whole answer says."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.serving import Served
from tests.api.tiny import chat, completion, parse_events, saying, serving

TEXTS = ("héllo wörld 😀.", "한국어 b", "c")


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(saying(*TEXTS)) as running:
        yield running


def body_of(route: str, n: int, logprobs: bool, usage: bool, **fields: Any) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    if route == "chat/completions":
        return chat(n=n, **({"logprobs": True, "top_logprobs": 2} if logprobs else {}), **options, **fields)
    return completion(n=n, **({"logprobs": 2} if logprobs else {}), **options, **fields)


class Machine:
    """Accepts a stream and keeps what it said. Raises AssertionError at the first event out of place."""

    def __init__(self, is_chat: bool, wants_usage: bool):
        self.is_chat = is_chat
        self.wants_usage = wants_usage
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.tokens: dict[int, list[str]] = {}
        self.usage: dict[str, Any] | None = None
        self.done = False
        self._constants: tuple[str, int, str] | None = None

    def feed(self, event: dict[str, Any] | str) -> None:
        assert not self.done
        if event == "[DONE]":
            assert self.texts.keys() == self.reasons.keys()
            assert (self.usage is not None) == self.wants_usage
            self.done = True
            return
        assert isinstance(event, dict)
        constants = (event["id"], event["created"], event["model"])
        assert self._constants in (None, constants)
        self._constants = constants
        assert self.usage is None
        if not event["choices"]:
            self.usage = event["usage"]
            return
        assert event.get("usage") is None
        for choice in event["choices"]:
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        assert index not in self.reasons
        if self.is_chat:
            delta = choice["delta"]
            assert (delta.get("role") == "assistant") == (index not in self.texts)
            text = delta.get("content", "")
        else:
            text = choice["text"]
        self.texts[index] = self.texts.get(index, "") + text
        if choice["logprobs"] is not None:
            entries = choice["logprobs"]["content"] if self.is_chat else choice["logprobs"]["tokens"]
            tokens = [entry["token"] for entry in entries] if self.is_chat else entries
            assert "".join(tokens) == text
            self.tokens.setdefault(index, []).extend(tokens)
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] in ("stop", "length")
            self.reasons[index] = choice["finish_reason"]


COMBINATIONS = list(itertools.product(("chat/completions", "completions"), (1, 3), (False, True), (False, True)))


@pytest.mark.parametrize(("route", "n", "logprobs", "usage"), COMBINATIONS)
def test_grammar(server: Served, route: str, n: int, logprobs: bool, usage: bool) -> None:
    """B01, B02, B03."""
    body = body_of(route, n, logprobs, usage)
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        whole = client.post(f"/v1/{route}", json=body).json()
        streams = list(pool.map(lambda _: client.post(f"/v1/{route}", json={**body, "stream": True}).text, range(8)))
    is_chat = route.startswith("chat")
    for text in streams:
        machine = Machine(is_chat, usage)
        for event in parse_events(text):
            machine.feed(event)
        assert machine.done
        for choice in whole["choices"]:
            index = choice["index"]
            said = choice["message"]["content"] if is_chat else choice["text"]
            assert machine.texts[index] == said == TEXTS[index]
            assert machine.reasons[index] == choice["finish_reason"]
            if logprobs and is_chat:
                assert machine.tokens[index] == [entry["token"] for entry in choice["logprobs"]["content"]]
            elif logprobs:
                assert machine.tokens[index] == choice["logprobs"]["tokens"]
        assert len(machine.texts) == n
        if usage:
            assert machine.usage is not None
            counted = {k: v for k, v in machine.usage.items() if k != "prompt_tokens_details"}
            assert counted == {k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"}
            assert machine.usage["total_tokens"] == machine.usage["prompt_tokens"] + machine.usage["completion_tokens"]


@pytest.mark.parametrize("interval", [1, 4, 1000])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_stream_interval(route: str, interval: int) -> None:
    """An event at the first token, at every so many, and at the last."""
    with serving(saying("abcdefghij" * 2), step_secs=0.005) as slow, slow.client() as client:
        body = body_of(route, 1, False, False, stream=True, stream_interval=interval)
        events = parse_events(client.post(f"/v1/{route}", json=body).text)
    machine = Machine(route.startswith("chat"), False)
    for event in events:
        machine.feed(event)
    assert machine.texts[0] == "abcdefghij" * 2
    content = len(events) - (2 if route.startswith("chat") else 1)
    fewest = 2 + 19 // interval
    assert 2 <= content <= fewest
    if interval == 4:
        assert content >= fewest - 2


def test_cached_tokens_are_equal_in_both_modes(server: Served) -> None:
    """B02 with a warm prefix cache."""
    body = completion("a prompt that is longer than one page of the cache", max_tokens=1)
    with server.client() as client:
        client.post("/v1/completions", json=body)
        whole = client.post("/v1/completions", json=body).json()["usage"]
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = parse_events(client.post("/v1/completions", json=streamed).text)
    assert whole["prompt_tokens_details"]["cached_tokens"] > 0
    assert events[-1] == "[DONE]"
    assert isinstance(events[-2], dict)
    assert events[-2]["usage"] == whole


def test_headers_of_a_stream(server: Served) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", json=completion(stream=True), headers={"X-Request-Id": "mine"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "mine"


def test_events_are_ascii_lines() -> None:
    """A client that splits at every Unicode line end must not be led astray."""
    with serving(saying("a\u2028b\u0085c\u2029d\r\ne")) as other, other.client() as client:
        for fields in ({}, {"logprobs": 3}):
            raw = client.post("/v1/completions", json=completion(stream=True, **fields)).text
            assert raw.isascii()
            assert "".join(e["choices"][0]["text"] for e in parse_events(raw)[:-1]) == "a\u2028b\u0085c\u2029d\r\ne"
