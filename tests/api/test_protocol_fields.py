"""Bodies of the completion routes, beyond `test_protocol.py`: every field of OpenAI's, nesting, counts, and blame.

Each field of OpenAI's routes is known here: it works, or it is refused by name.
"""

import json
import time
from typing import Any

import pytest

from api.openapi import build
from api.protocol.chat import MAX_PARTS, ChatRequest
from api.protocol.common import RequestModel
from api.protocol.completions import CompletionRequest
from api.protocol.errors import InvalidRequestError
from api.protocol.json_body import MAX_DEPTH, decode_object
from api.protocol.tokenize import DetokenizeRequest, TokenizeRequest

TEXT = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Graz"}'}}
BOTH: list[tuple[type[RequestModel], dict[str, Any]]] = [(CompletionRequest, TEXT), (ChatRequest, CHAT)]


def refused(kind: type[RequestModel], body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        kind.parse(body)
    return caught.value


def talk(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages)}


# The parameters of chat.completions.create and completions.create in openai 3.57.
OPENAI_COMPLETION = """
    best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream
    stream_options suffix temperature top_p user
"""
OPENAI_CHAT = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
    metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
    stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
"""


@pytest.mark.parametrize(("kind", "theirs"), [(ChatRequest, OPENAI_CHAT), (CompletionRequest, OPENAI_COMPLETION)])
def test_every_field_of_openai_is_known(kind: type[RequestModel], theirs: str) -> None:
    assert set(theirs.split()) <= set(kind.model_fields) | set(kind.unsupported)


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_no_field_is_both_supported_and_not(kind: type[RequestModel], body: dict[str, Any]) -> None:
    assert not set(kind.model_fields) & set(kind.unsupported)
    for name in kind.unsupported:
        error = refused(kind, {**body, name: {"asks": "for something"}})
        assert (error.param, "not supported yet" in error.message) == (name, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", 0), ("store", 0.0), ("parallel_tool_calls", 1), ("skip_special_tokens", False),
        ("skip_special_tokens", 1), ("include_stop_str_in_output", True), ("length_penalty", True),
        ("verbosity", "low"), ("prompt_cache_retention", "24h"), ("response_format", {"type": "text", "more": 1}),
    ],
)  # fmt: skip
def test_only_the_harmless_value_itself_passes(field: str, value: Any) -> None:
    """In Python 0 == False and 1 == True; here they are other values."""
    assert refused(ChatRequest, {**CHAT, field: value}).param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False}, {"skip_special_tokens": True}, {"use_beam_search": False}, {"length_penalty": 1},
        {"verbosity": "medium"}, {"prompt_cache_retention": "in_memory"}, {"stream_options": {}},
        {"stream": True, "stream_options": {"include_usage": None}},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)  # fmt: skip
def test_harmless_values(fields: dict[str, Any]) -> None:
    ChatRequest.parse({**CHAT, **fields})


def test_obfuscation_is_refused() -> None:
    error = refused(ChatRequest, {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}})
    assert error.param == "stream_options.include_obfuscation"
    assert "not supported yet" in error.message


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"best_of": 1, "n": 2}, {"best_of": 2, "n": 2}, {"best_of": True}])
def test_best_of_none(fields: dict[str, Any]) -> None:
    assert refused(CompletionRequest, {**TEXT, **fields}).param == "best_of"
    CompletionRequest.parse({**TEXT, "best_of": 1})


def test_an_answer_can_be_sent_back_as_the_client_dumps_it() -> None:
    """B13."""
    dumped = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}
    dumped |= {"function_call": None, "tool_calls": None}
    ChatRequest.parse(talk(*CHAT["messages"], dumped))


@pytest.mark.parametrize("name", ["audio", "function_call", "refusal", "annotations"])
def test_parts_of_a_turn_that_we_would_drop_are_refused(name: str) -> None:
    error = refused(ChatRequest, talk({"role": "assistant", "content": "a", name: ["x"]}))
    assert (error.param, "not supported yet" in error.message) == (f"messages.0.{name}", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (talk({"role": "user"}), "messages.0.content"),
        (talk({"role": "user", "content": "a", "tool_calls": [CALL]}), "messages.0.tool_calls"),
        (talk({"role": "tool", "content": "a"}), "messages.0.tool_call_id"),
        (talk({"role": "user", "content": "a", "tool_call_id": "x"}), "messages.0.tool_call_id"),
        (talk({"role": "tool", "content": "a", "tool_call_id": "x"}), "messages.0.tool_call_id"),
        ({**CHAT, "continue_final_message": True}, "continue_final_message"),
        ({**CHAT, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({**CHAT, "echo": True}, "echo"),
        ({**CHAT, "top_logprobs": 1}, "top_logprobs"),
        ({**CHAT, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({**CHAT, "metadata": {"a": 1}}, "metadata"),
        ({**CHAT, "metadata": {"a" * 65: "b"}}, "metadata"),
    ],
)
def test_rules_across_fields_name_one(body: dict[str, Any], param: str) -> None:
    assert refused(ChatRequest, body).param == param


def test_arguments_of_calls_reach_the_template_as_objects() -> None:
    """Templates write them as JSON; a text would come out quoted twice. What is no object stays as it is."""
    cut = {**CALL, "function": {"name": "f", "arguments": '{"city": "Gr'}}
    message = ChatRequest.parse(talk({"role": "assistant", "content": None, "tool_calls": [CALL, cut]})).messages[0]
    shown = message.for_template()
    assert [call["function"]["arguments"] for call in shown["tool_calls"]] == [{"city": "Graz"}, '{"city": "Gr']
    assert shown["content"] == ""


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 1000, 1200, 5000, 100_000])
def test_nesting_is_bounded(opening: str, depth: int) -> None:
    """B18. Between what the decoder bears and what later code bears lay a 500."""
    body = b'{"a":' + opening.encode() * depth + b"1" + (b"]" if opening == "[" else b"}") * depth + b"}"
    with pytest.raises(InvalidRequestError, match="deep"):
        decode_object(body)


def test_nesting_within_the_bound_and_brackets_in_text_pass() -> None:
    depth = MAX_DEPTH - 1
    decode_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    assert decode_object(json.dumps({"a": "[" * 1000}).encode()) == {"a": "[" * 1000}


@pytest.mark.parametrize("key", ["01", "-1", "+1", " 1", "1.0", "١", ""])
def test_bias_keys_are_plain_numbers(key: str) -> None:
    assert refused(ChatRequest, {**CHAT, "logit_bias": {key: 1}}).param == "logit_bias"


PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, talk({"role": "user", "content": [PART] * 100_000})),
        (ChatRequest, talk(*[{"role": "user", "content": [PART] * 2}] * (MAX_PARTS // 2 + 1))),
        (ChatRequest, talk({"role": "assistant", "content": "a", "tool_calls": [CALL] * 100_000})),
        (ChatRequest, {**CHAT, "metadata": {str(i): "" for i in range(100_000)}}),
        (ChatRequest, {**CHAT, "chat_template_kwargs": {str(i): 1 for i in range(100_000)}}),
        (ChatRequest, {**CHAT, "stop": ["a"] * 100_000}),
        (ChatRequest, {**CHAT, "logit_bias": {str(i): 1 for i in range(100_000)}}),
        (ChatRequest, {**CHAT, "stop_token_ids": [1] * 100_000}),
        (CompletionRequest, {**TEXT, "prompt": ["a"] * 100_000}),
        (CompletionRequest, {**TEXT, "prompt": [[1]] * 100_000}),
        (DetokenizeRequest, {"tokens": [1] * 2_000_000}),
    ],
)
def test_counts_are_checked_before_entries(kind: type[RequestModel], body: dict[str, Any]) -> None:
    """B57. The best of three, as the machine is shared."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert "at most" in refused(kind, body).message
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1


def test_names_of_unknown_fields_are_cut() -> None:
    name = "k" * 100_000
    for body in ({**CHAT, name: 1}, talk({"role": "user", "content": "a", name: 1}), {**CHAT, "metadata": {name: 1}}):
        error = refused(ChatRequest, body)
        assert len(error.message) < 300
        assert error.param is not None
        assert len(error.param) < 100


def test_the_openapi_document_shows_bodies_as_they_may_be_sent() -> None:
    schemas = build()["components"]["schemas"]
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [option["type"] for option in prompt] == ["string", "array", "array", "array"]
    assert [option["type"] for option in schemas["ChatRequest"]["properties"]["stop"]["anyOf"]] == ["string", "array"]
    content = schemas["Message"]["properties"]["content"]["anyOf"]
    assert {"$ref": "#/components/schemas/TextPart"} in [option.get("items") for option in content]
    assert set(schemas["ChatRequest"]["required"]) == {"model", "messages"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": CHAT["messages"], "parse_special": True}, "parse_special"),
    ],
)
def test_tokenize_refuses_what_it_would_ignore(body: dict[str, Any], param: str) -> None:
    assert refused(TokenizeRequest, body).param == param
