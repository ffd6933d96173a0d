"""`POST /v1/completions` on the fake engine: prompts and choices, echo, logprobs, stop strings, bad input, metrics."""

import itertools
from typing import Any

import pytest

from scheduler import SchedulerConfig
from tests.api.serving import Served
from tests.api.tiny import MODEL, chat, completion, metric, parse_events, saying, serving, wait_until

TEXT = "the thé 😀 end"


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(saying(TEXT, "second")) as running:
        yield running


def post(server: Served, body: dict[str, Any], route: str = "completions") -> dict[str, Any]:
    with server.client() as client:
        response = client.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def streamed(server: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of every choice, merged into the shape of a whole answer's `choices`."""
    with server.client() as client:
        events = parse_events(client.post("/v1/completions", json={**body, "stream": True}).text)
    merged: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        assert isinstance(event, dict)
        for choice in event["choices"]:
            known = merged.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                lists = known["logprobs"] or {name: [] for name in choice["logprobs"]}
                known["logprobs"] = {name: lists[name] + choice["logprobs"][name] for name in lists}
    return [merged[index] for index in sorted(merged)]


def test_choices_are_numbered_by_prompt_then_choice(server: Served) -> None:
    answer = post(server, completion(["a", "b", "c"], n=2))
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [TEXT, "second"] * 3
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 3 * (len(TEXT.encode()) + 1 + len("second") + 1)


def test_token_ids_are_prompts_too(server: Served) -> None:
    assert post(server, completion([104, 105], max_tokens=1, echo=True))["choices"][0]["text"] == "hit"
    texts = [c["text"] for c in post(server, completion([[104], [105]], max_tokens=1, echo=True))["choices"]]
    assert texts == ["ht", "it"]


@pytest.mark.parametrize(("echo", "logprobs"), list(itertools.product((False, True), (None, 0, 1, 5))))
@pytest.mark.parametrize("prompt", ["hé <|im_end|>", [104, 0xC3, 0xA9, 0xF0]])
def test_logprobs_are_aligned(server: Served, echo: bool, logprobs: int | None, prompt: Any) -> None:
    """B11, in both modes."""
    body = completion(prompt, echo=echo, logprobs=logprobs, max_tokens=9)
    choice = post(server, body)["choices"][0]
    assert streamed(server, body) == [choice]
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    lists = choice["logprobs"]
    assert len({len(values) for values in lists.values()}) == 1
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["text_offset"] == list(itertools.accumulate(map(len, lists["tokens"][:-1]), initial=0))
    assert lists["token_logprobs"][1:] == [-0.25] * (len(lists["tokens"]) - 1)
    assert (lists["token_logprobs"][0] is None) == echo
    for top in lists["top_logprobs"][1:]:
        assert len(top) == max(1, logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_no_new_tokens(server: Served, stream: bool) -> None:
    """B09."""
    body = completion(["hallo 😀", "the"], echo=True, logprobs=1, max_tokens=0)
    choices = streamed(server, body) if stream else post(server, body)["choices"]
    assert [choice["text"] for choice in choices] == ["hallo 😀", "the"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert choices[0]["logprobs"]["token_logprobs"] == [None] + [-0.25] * 9
    assert choices[1]["logprobs"]["tokens"] == ["th", "e"]
    if not stream:
        assert post(server, body)["usage"]["completion_tokens"] == 0


def test_unfinished_character_is_left_out_in_both_modes(server: Served) -> None:
    for count in range(1, len(TEXT.encode()) + 1):
        body = completion(max_tokens=count, logprobs=0)
        choice = post(server, body)["choices"][0]
        assert choice["text"] == TEXT.encode()[:count].decode(errors="ignore")
        assert streamed(server, body) == [choice]
        assert len(choice["logprobs"]["tokens"]) == count


@pytest.mark.parametrize(
    ("stop", "text", "count"), [("th", "", 2), ("é", "the th", 8), ([" 😀", "nope"], "the thé", 13), ("end!", TEXT, 18)]
)
def test_stop_strings(server: Served, stop: Any, text: str, count: int) -> None:
    for logprobs in (None, 1):
        body = completion(stop=stop, logprobs=logprobs)
        answer = post(server, body)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] == count
        assert streamed(server, body) == [choice]


def test_stop_string_ends_the_request_in_the_engine() -> None:
    with serving(saying("abc" * 60, end=False), step_secs=0.002) as server:
        post(server, completion(stop="bca"))
        wait_until(lambda: server.engine.stats().scheduler.num_running == 0)
        assert len(server.engine.submitted[0].output_token_ids) < 30


BAD_PROMPTS: list[Any] = ["", [""], [], [[]], ["a", ""], None, 5, [1.5], [True], ["a", 1], [[1], "a"], [-1], [1 << 70]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [*BAD_PROMPTS, [262, 263]])
def test_bad_prompts(server: Served, prompt: Any, stream: bool) -> None:
    """B12, B23: plain JSON, streamed or not; and the server goes on."""
    with server.client() as client:
        response = client.post("/v1/completions", json=completion(prompt, stream=stream))
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert post(server, completion(max_tokens=1))["choices"][0]["text"] == "t"


BAD_BODIES = [b"", b"{", b"[]", b'"a"', b"1", b"[" * 100_000, b'{"a":' + b"1" * 5000 + b"}", b'{"model":"\\ud800"}']
BAD_BODIES += [b'{"model":"a","model":"b"}', b'{"model":"\xff"}', b"\xef\xbb\xbf{}", b'{"model":NaN}', b'{"n":1e999}']


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:20]))
def test_bad_bodies(server: Served, route: str, body: bytes) -> None:
    """B18."""
    with server.client() as client:
        response = client.post(route, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"n": 0}, 400, "n"),
        ({"n": 17}, 400, "n"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 256}, 400, "max_tokens"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"priority": 5}, 400, "priority"),
        ({"priority": True}, 400, "priority"),
        ({"best_of": 2}, 400, "best_of"),
        ({"stop": [""]}, 400, "stop"),
        ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
        ({"nonsense": 1}, 400, "nonsense"),
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
    ],
)
def test_bad_fields(server: Served, fields: dict[str, Any], status: int, param: str, stream: bool) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", json=completion(**{"stream": stream, **fields}))
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


# fmt: off
OPTIONAL = [
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "min_tokens",
    "ignore_eos", "seed", "stream", "logprobs", "echo", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stream_options", "stream_interval", "priority", "service_tier",
    "cache_salt", "user", "metadata", "best_of", "suffix", "parse_special",
]
# fmt: on


@pytest.mark.parametrize("name", [*OPTIONAL, "all"])
def test_null_means_left_out(server: Served, name: str) -> None:
    """B19."""
    nulls = dict.fromkeys(OPTIONAL if name == "all" else [name])
    assert post(server, completion(**nulls))["choices"] == post(server, completion())["choices"]


def test_prompt_that_fills_the_context(server: Served) -> None:
    """B08."""
    assert post(server, completion("x" * 250))["usage"]["completion_tokens"] == 6
    assert post(server, completion("x" * 250, max_tokens=6))["usage"]["completion_tokens"] == 6
    with server.client() as client:
        for body in (completion("x" * 250, max_tokens=7), completion("x" * 256), completion("x" * 9000)):
            error = client.post("/v1/completions", json=body)
            assert error.status_code == 400
            assert "256" in error.json()["error"]["message"]


def test_full_queue_is_429() -> None:
    config = SchedulerConfig(
        max_num_seqs=1, max_queue_size=2, max_num_batched_tokens=64, max_model_len=64, num_pages=16
    )
    with serving(scheduler=config) as server, server.client() as client:
        for stream in (False, True):
            response = client.post("/v1/completions", json=completion(n=4, stream=stream))
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
        assert client.post("/v1/completions", json=completion(n=2)).status_code == 200
        assert metric(server, "requests_received_total") == 2
        assert metric(server, "request_failure_total", code="429") == 2


def test_counters_add_up() -> None:
    with serving(saying(TEXT, "second")) as server:
        used = [
            post(server, body)["usage"]
            for body in (completion(["ab", "c"], n=2), completion(stop="é"), completion(max_tokens=3))
        ]
        used.append(post(server, chat(n=3), "chat/completions")["usage"])
        assert metric(server, "requests_received_total") == 9
        assert metric(server, "request_success_total", finished_reason="stop") == 8
        assert metric(server, "request_success_total", finished_reason="length") == 1
        assert metric(server, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in used)
        assert metric(server, "generation_tokens_total") == sum(usage["completion_tokens"] for usage in used)
        assert metric(server, "time_to_first_token_seconds_count", priority_class="default") == 9
        gaps = sum(usage["completion_tokens"] for usage in used) - 9
        assert metric(server, "inter_token_latency_seconds_count", priority_class="default") == gaps


def test_models(server: Served) -> None:
    with server.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [MODEL]
        assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
        missing = client.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_back(server: Served) -> None:
    with server.client() as client:
        made = client.post("/tokenize", json={"prompt": "the <|im_end|>"}).json()
        assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 256)
        assert client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "the <|im_end|>"}
        conversation = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
        assert conversation["count"] == post(server, chat(), "chat/completions")["usage"]["prompt_tokens"]
        large = client.post("/tokenize", json={"prompt": "the " * 5000}).json()
        assert large["count"] > 256
        assert client.post("/detokenize", json={"tokens": [999999]}).status_code == 400
