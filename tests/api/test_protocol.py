"""Bodies of the completion routes: what is accepted, what is refused and how it is said. Mostly from field reports."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.protocol.chat import ChatRequest
from api.protocol.completions import CompletionRequest
from api.protocol.errors import ApiError, InvalidRequestError
from api.protocol.json_body import decode_object
from api.protocol.tokenize import DetokenizeRequest, TokenizeRequest

TEXT = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ENVELOPE = {"message", "type", "param", "code"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refused(kind, body) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        kind.parse(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("value", [0, 1, 0.0, 0.25, 1.0])
def test_priority_accepted(value):
    for kind, body in ((CompletionRequest, TEXT), (ChatRequest, CHAT)):
        assert kind.parse({**body, "priority": value}).priority == value


@pytest.mark.parametrize("value", [-1, 1.0001, 5, 2**63, 2**64, "1", True, False, [], {}])
def test_priority_refused_never_clamped(value):
    for kind, body in ((CompletionRequest, TEXT), (ChatRequest, CHAT)):
        assert refused(kind, {**body, "priority": value}).param == "priority"


@pytest.mark.parametrize(
    "text",
    [
        b"", b"   ", b"[]", b"1", b'"x"', b"null", b"{", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',
        b'{"a": ' + b"1" * 5000 + b"}", b'{"a": 1, "a": 2}', b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}", b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 100000,
    ],
)  # fmt: skip
def test_strict_json(text):
    with pytest.raises(InvalidRequestError) as caught:
        decode_object(text)
    assert len(caught.value.message) < 200


def test_json_surrogate_pairs_and_unicode_pass():
    assert decode_object(b'{"a": "\\ud83d\\ude00 \xf0\x9f\x98\x80"}') == {"a": "😀 😀"}


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["a", ""], None, 5, {}, [True], [["a"]], [1.5], ["a", [1]], [[1], 2]]
)
def test_empty_and_odd_prompts(prompt):
    assert refused(CompletionRequest, {"model": "m", "prompt": prompt}).param == "prompt"


def test_missing_prompt_and_messages():
    assert refused(CompletionRequest, {"model": "m"}).param == "prompt"
    for messages in ([], None):
        assert refused(ChatRequest, {"model": "m", "messages": messages}).param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [
            {"role": "assistant", "content": "x", "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "a"},
        ],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a", "name": None}],
    ],
)
def test_valid_histories(messages):
    ChatRequest.parse({"model": "m", "messages": messages})


def test_text_parts_join_in_order():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatRequest.parse({**CHAT, "messages": [{"role": "user", "content": parts}]}).messages[0].content == "ab"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "SYSTEM", "content": "a"}, "role"),
        ({"role": 0, "content": "a"}, "role"),
        ({"role": "unknown", "content": "a"}, "role"),
        ({"role": "user"}, "messages.0"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}, "content"),
        ({"role": "assistant", "content": None}, "messages.0"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages.0"),
        ({"role": "user", "content": "a", "extra": 1}, "extra"),
    ],
)
def test_invalid_messages_name_the_field(message, where):
    assert where in refused(ChatRequest, {**CHAT, "messages": [message]}).param


def test_a_tool_message_must_answer_a_call():
    refused(ChatRequest, {**CHAT, "messages": [{"role": "tool", "content": "1", "tool_call_id": "nobody"}]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True), ("max_tokens", 10**18),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", 1e308), ("temperature", True),
        ("top_p", 1.1), ("min_p", -1), ("top_k", -2), ("top_k", 1.5), ("n", 0), ("n", 17), ("n", 10**9),
        ("seed", -1), ("seed", 2**63), ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("stop", [""]), ("stop", ["a"] * 17), ("stop", 5), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", [1]), ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("min_tokens", -1),
        ("cache_salt", ""), ("cache_salt", "a\0b"), ("cache_salt", "x" * 257), ("stream", "yes"),
        ("stream_interval", 0),
        ("stream_options", {"x": 1}), ("stream_options", []), ("service_tier", 5), ("user", 5),
    ],
)  # fmt: skip
def test_ranges_on_both_routes(field, value):
    for kind, body in ((CompletionRequest, TEXT), (ChatRequest, CHAT)):
        for stream in (False, True):
            assert refused(kind, {**body, "stream": stream, field: value}).param.startswith(field)


def test_logprobs_limits():
    for value in (-1, 21, 10**6, True):
        refused(CompletionRequest, {**TEXT, "logprobs": value})
    for extra in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}):
        refused(ChatRequest, {**CHAT, **extra})
    assert ChatRequest.parse({**CHAT, "logprobs": True, "top_logprobs": 20}).top_logprobs == 20


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_null_means_left_out(kind):
    body = TEXT if kind is CompletionRequest else CHAT
    optional = [*(set(kind.model_fields) - set(body)), *kind.unsupported]
    plain = kind.parse(body)
    for name in optional:
        assert kind.parse({**body, name: None}) == plain, name
    assert kind.parse({**body, **dict.fromkeys(optional)}) == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]), ("audio", {}),
        ("response_format", {"type": "json_object"}), ("modalities", ["audio"]), ("prediction", {}), ("store", True),
        ("web_search_options", {}), ("reasoning_effort", "low"), ("verbosity", "low"),
    ],
)  # fmt: skip
def test_known_but_unsupported_fields_say_so(field, value):
    error = refused(ChatRequest, {**CHAT, field: value})
    assert "not supported yet" in error.message
    assert error.param == field


def test_harmless_values_of_unsupported_fields_pass():
    ChatRequest.parse({**CHAT, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False})
    CompletionRequest.parse({**TEXT, "best_of": 1, "suffix": ""})


def test_unknown_fields_name_the_nearest():
    assert "temperature" in refused(ChatRequest, {**CHAT, "temprature": 1}).message
    error = refused(CompletionRequest, {**TEXT, "disaggregated_params": {"host": "10.0.0.1"}})
    assert error.param == "disaggregated_params"


def test_template_rules():
    refused(ChatRequest, {**CHAT, "add_generation_prompt": True, "continue_final_message": True})
    refused(ChatRequest, {**CHAT, "continue_final_message": True})
    refused(ChatRequest, {**CHAT, "echo": True})
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        refused(ChatRequest, {**CHAT, "chat_template_kwargs": {name: 1}})
    ChatRequest.parse({**CHAT, "chat_template_kwargs": {"enable_thinking": False}})


def test_tokenize_takes_one_of_prompt_and_messages():
    refused(TokenizeRequest, {})
    refused(TokenizeRequest, {"prompt": "a", "messages": CHAT["messages"]})
    assert TokenizeRequest.parse({"prompt": ""}).prompt == ""
    refused(DetokenizeRequest, {"tokens": [1, -1]})


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "stop": ["a"] * 100_000},
        {**CHAT, "logit_bias": {str(i): 1 for i in range(100_000)}},
        {**CHAT, "messages": CHAT["messages"] * 100_000},
        {**CHAT, "tools": [{}] * 100_000},
    ],
)
def test_absurd_counts_are_refused_at_once(body):
    started = time.perf_counter()
    refused(ChatRequest, body)
    refused(CompletionRequest, {**TEXT, "prompt": ["a"] * 100_000})
    assert time.perf_counter() - started < 0.5


def test_messages_never_echo_the_prompt():
    secret = "SECRET-" * 5
    for body in ({**TEXT, "prompt": [secret, 5]}, {**TEXT, "prompt": secret, "user": [secret]}):
        assert "SECRET" not in refused(CompletionRequest, body).message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_body_is_a_request_or_a_400(data):
    kind = data.draw(st.sampled_from([CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest]))
    names = [*kind.model_fields, *kind.unsupported, "unknown"]
    body = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=6))
    text = json.dumps({**data.draw(st.sampled_from([TEXT, CHAT, {}])), **body}).encode()
    error = None
    try:
        kind.parse(decode_object(text))
    except ApiError as caught:
        error = caught
    assert error is None or (error.status == 400 and set(error.envelope()["error"]) == ENVELOPE)
