"""Validated bodies to engine requests: lengths, ids, seeds, priorities, end tokens. On a byte-level tokenizer."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.protocol.chat import ChatRequest
from api.protocol.completions import CompletionRequest
from api.protocol.errors import ApiError, InvalidRequestError, NotFoundError
from api.protocol.json_body import decode_object
from api.protocol.tokenize import TokenizeRequest
from api.translate import GenerationTask, Limits, Translator
from model.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from tests.api.tiny import END, START, VOCAB_SIZE, tiny_tokenizer

CONTEXT = 64
TIERS = {"priority": 1.0, "default": 0.5, "auto": 0.5, "flex": 0.0}
TOKENIZER = tiny_tokenizer()
LIMITS = Limits(
    max_model_len=CONTEXT,
    max_tokens_for=lambda length: CONTEXT - length,
    model_names=("m",),
    service_tiers=TIERS,
    allow_request_chat_template=False,
    default_seed=None,
    eos_token_ids=(END,),
)


def translator(**changes: Any) -> Translator:
    return Translator(TOKENIZER, replace(LIMITS, **changes))


def text(prompt: Any = "x", server: Translator | None = None, **fields: Any) -> list[GenerationTask]:
    body = CompletionRequest.parse({"model": "m", "prompt": prompt} | fields)
    return (server or translator()).completion_tasks(body)


def chat(*messages: dict[str, Any], server: Translator | None = None, **fields: Any) -> list[GenerationTask]:
    turns = messages or ({"role": "user", "content": "x"},)
    body = ChatRequest.parse({"model": "m", "messages": list(turns)} | fields)
    return (server or translator()).chat_tasks(body)


def refused(ask: Any, *arguments: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        ask(*arguments, **fields)
    return caught.value


def sampling(task: GenerationTask) -> SamplingParams:
    return cast(SamplingParams, task.request.sampling)


@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1])
@pytest.mark.parametrize("ids", [False, True])
def test_prompt_and_output_up_to_the_context(length: int, ids: bool) -> None:
    """B08."""
    prompt = [120] * length if ids else "x" * length
    room = CONTEXT - length
    assert text(prompt)[0].request.max_new_tokens == room
    assert text(prompt, max_tokens=room)[0].request.max_new_tokens == room
    error = refused(text, prompt, max_tokens=room + 1)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert all(str(number) in error.message for number in (CONTEXT, CONTEXT + 1, length, room + 1))


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_fills_the_context(length: int, max_tokens: int | None) -> None:
    error = refused(text, "x" * length, max_tokens=max_tokens)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert f"{length} tokens" in error.message


def test_scoring_may_fill_the_context() -> None:
    """B09."""
    task = text("x" * CONTEXT, echo=True, logprobs=0, max_tokens=0)[0]
    assert (task.request.max_new_tokens, sampling(task).prompt_logprobs) == (0, 0)
    assert not task.request.read_prefix_cache
    assert task.prompt_text == "x" * CONTEXT
    refused(text, "x" * (CONTEXT + 1), echo=True, logprobs=0, max_tokens=0)


def test_no_tokens_without_echo() -> None:
    assert refused(text, max_tokens=0).param == "max_tokens"
    assert refused(chat, max_tokens=0).param == "max_tokens"
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_room_in_the_pool_counts_too() -> None:
    small = translator(max_tokens_for=lambda length: 10 - length)
    assert text("abc", small)[0].request.max_new_tokens == 7
    assert "7" in refused(text, "abc", small, max_tokens=8).message
    assert refused(text, "x" * 10, small).param == "prompt"


def test_max_completion_tokens_wins_and_is_blamed() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3)[0].request.max_new_tokens == 3
    assert chat(max_tokens=10**6, max_completion_tokens=3)[0].request.max_new_tokens == 3
    assert refused(chat, max_tokens=3, max_completion_tokens=10**6).param == "max_completion_tokens"


@pytest.mark.parametrize("ask", [text, chat])
def test_token_ids_are_below_the_vocabulary(ask: Any) -> None:
    for good in ({"logit_bias": {str(VOCAB_SIZE - 1): 1}}, {"stop_token_ids": [VOCAB_SIZE - 1]}):
        ask(**good)
    for param, value in (("logit_bias", {str(VOCAB_SIZE): 1}), ("stop_token_ids", [VOCAB_SIZE])):
        error = refused(ask, **{param: value})
        assert error.param == param
        assert str(VOCAB_SIZE) in error.message
    for prompt in ([VOCAB_SIZE], [[1], [2, VOCAB_SIZE]]):
        assert refused(text, prompt).param == "prompt"


def test_end_and_stop_tokens_fit_what_the_device_holds() -> None:
    """One more than its table takes would end the engine."""
    most = list(range(MAX_STOP_TOKEN_IDS - 1))
    assert len(sampling(text(stop_token_ids=most)[0]).stop_token_ids) == MAX_STOP_TOKEN_IDS
    assert refused(text, stop_token_ids=[*most, 200]).param == "stop_token_ids"
    assert len(sampling(text(stop_token_ids=[*most, END])[0]).stop_token_ids) == MAX_STOP_TOKEN_IDS
    assert len(sampling(text(stop_token_ids=[*most, 200], ignore_eos=True)[0]).stop_token_ids) == MAX_STOP_TOKEN_IDS


@pytest.mark.parametrize("ask", [text, chat])
def test_end_tokens(ask: Any) -> None:
    """B20."""
    task = ask(stop_token_ids=[5], min_tokens=3, max_tokens=9)[0]
    assert task.request.stop_token_ids == {END, 5} == set(sampling(task).stop_token_ids)
    assert (task.request.min_new_tokens, sampling(task).min_tokens, task.min_tokens) == (3, 3, 3)
    assert ask(stop_token_ids=[5], ignore_eos=True)[0].request.stop_token_ids == {5}
    assert refused(ask, min_tokens=9, max_tokens=8).param == "min_tokens"
    assert refused(ask, min_tokens=CONTEXT).param == "min_tokens"


def test_choices_of_several_prompts() -> None:
    """Choice i of every prompt draws from (seed, i); indices run over the prompts."""
    tasks = text(["a", "b", "c"], n=2, seed=7)
    assert [(task.index, task.prompt_index) for task in tasks] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert [(sampling(task).seed, sampling(task).choice) for task in tasks] == [(7, 0), (7, 1)] * 3
    assert len({task.request.request_id for task in tasks}) == 6
    assert [list(task.prompt_token_ids) for task in tasks[::2]] == [[97], [98], [99]]


def test_seeds() -> None:
    drawn = {sampling(text()[0]).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert len({sampling(task).seed for task in text(n=4)}) == 1
    fixed = translator(default_seed=3)
    assert sampling(text("x", fixed)[0]).seed == 3
    assert sampling(text("x", fixed, seed=0)[0]).seed == 0
    assert sampling(text(seed=2**63 - 1)[0]).seed == 2**63 - 1


@pytest.mark.parametrize("ask", [text, chat])
@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0.5), ({"priority": None}, 0.5), ({"priority": 0}, 0.0), ({"priority": 1}, 1.0),
        ({"service_tier": "flex"}, 0.0), ({"service_tier": "priority"}, 1.0), ({"service_tier": "auto"}, 0.5),
        ({"service_tier": "flex", "priority": 0.75}, 0.75),
    ],
)  # fmt: skip
def test_priority(ask: Any, fields: dict[str, Any], priority: float) -> None:
    """B30."""
    assert ask(**fields)[0].request.priority == priority


@pytest.mark.parametrize("ask", [text, chat])
def test_unknown_tier_and_model(ask: Any) -> None:
    assert refused(ask, service_tier="scale").param == "service_tier"
    assert refused(ask, service_tier="scale", priority=1).param == "service_tier"
    with pytest.raises(NotFoundError) as caught:
        ask(model="other")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_sampling_fields_arrive() -> None:
    fields = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "seed": 9,
    }  # fmt: skip
    for ask in (text, chat):
        got = sampling(ask(logit_bias={"5": -100, "6": 2.5}, cache_salt="s", stop="end", **fields)[0])
        assert {name: getattr(got, name) for name in fields} == fields
        assert dict(got.logit_bias) == {5: -100.0, 6: 2.5}
    task = text(cache_salt="s", stop=["a", "b"])[0]
    assert (task.request.cache_salt, task.stop) == ("s", ("a", "b"))
    assert sampling(text(top_k=-1)[0]).top_k == 0


@pytest.mark.parametrize(
    ("fields", "wanted"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)]
)
def test_logprobs_of_chats(fields: dict[str, Any], wanted: int | None) -> None:
    """B11."""
    task = chat(**fields)[0]
    assert (task.logprobs, sampling(task).logprobs, sampling(task).prompt_logprobs) == (wanted, wanted, None)
    assert task.request.read_prefix_cache


@pytest.mark.parametrize("logprobs", [None, 0, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_completions(logprobs: int | None, echo: bool) -> None:
    task = text(logprobs=logprobs, echo=echo)[0]
    assert sampling(task).logprobs == logprobs
    assert sampling(task).prompt_logprobs == (logprobs if echo else None)
    assert task.request.read_prefix_cache == (not echo or logprobs is None)
    assert task.prompt_text == ("x" if echo else None)


def test_special_tokens_are_text_unless_asked_for() -> None:
    assert END not in text("a<|im_end|>")[0].prompt_token_ids
    assert list(text("a<|im_end|>", parse_special=True)[0].prompt_token_ids) == [97, END]
    ids = chat({"role": "user", "content": "<|im_end|>"})[0].prompt_token_ids
    assert (ids.count(START), ids.count(END)) == (2, 1)


def test_prefill_ends_the_prompt_exactly() -> None:
    """B17."""
    turns = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure,\n\n"})
    fields = {"continue_final_message": True, "max_tokens": 4}
    wide = translator(max_model_len=200, max_tokens_for=lambda length: 200 - length)
    task = chat(*turns, server=wide, **fields)[0]
    assert TOKENIZER.decode(task.prompt_token_ids).endswith("assistant\nSure,\n\n")
    assert task.prompt_text is None
    again = chat(*turns, server=wide, echo=True, **fields)[0]
    assert (again.prompt_token_ids, again.prompt_text) == (task.prompt_token_ids, "Sure,\n\n")


def test_a_template_in_a_request_needs_leave() -> None:
    template = "{{ messages[0].content }}"
    assert refused(chat, chat_template=template).param == "chat_template"
    allowed = translator(allow_request_chat_template=True)
    assert list(chat(server=allowed, chat_template=template)[0].prompt_token_ids) == [120]


class CountingTokenizer:
    """Counts what is encoded; else the tiny tokenizer."""

    def __init__(self) -> None:
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded += 1
        return TOKENIZER.encode(text, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "nonsense"}, {"stop_token_ids": [VOCAB_SIZE]}, {"logit_bias": {str(VOCAB_SIZE): 1}},
        {"min_tokens": 9, "max_tokens": 8}, {"prompt": ["a", "x" * 10**6]},
    ],
)  # fmt: skip
def test_what_is_surely_wrong_is_refused_before_encoding(fields: dict[str, Any]) -> None:
    """B57."""
    tokenizer = CountingTokenizer()
    server = Translator(cast(Any, tokenizer), LIMITS)
    refused(text, fields.get("prompt", "x"), server, **{k: v for k, v in fields.items() if k != "prompt"})
    if "prompt" not in fields:
        refused(chat, server=server, **fields)
    assert tokenizer.encoded == 0


def test_a_batch_stops_at_its_first_prompt_that_is_too_long() -> None:
    tokenizer = CountingTokenizer()
    refused(text, ["x" * 100] * 128, Translator(cast(Any, tokenizer), LIMITS))
    assert tokenizer.encoded == 1


def test_tokenize_and_back() -> None:
    server = translator()
    assert server.tokenize(TokenizeRequest.parse({"prompt": "the"})) == list(text("the")[0].prompt_token_ids)
    messages = [{"role": "user", "content": "x"}]
    assert server.tokenize(TokenizeRequest.parse({"messages": messages})) == list(chat()[0].prompt_token_ids)
    assert server.detokenize([104, 105]) == "hi"
    assert refused(server.detokenize, [VOCAB_SIZE]).param == "tokens"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(0, 2) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*CompletionRequest.model_fields, *ChatRequest.model_fields, "unknown"]


@settings(max_examples=400, deadline=None)
@given(extra=st.dictionaries(st.sampled_from(sorted(set(FIELDS))), VALUES, max_size=4), is_chat=st.booleans())
def test_any_body_becomes_tasks_or_an_error(extra: dict[str, Any], is_chat: bool) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    server = translator(allow_request_chat_template=True)
    status = 200
    try:
        data = decode_object(json.dumps({"model": "m", **base, **extra}).encode())
        if is_chat:
            tasks = server.chat_tasks(ChatRequest.parse(data))
        else:
            tasks = server.completion_tasks(CompletionRequest.parse(data))
        assert tasks
        assert all(len(t.prompt_token_ids) + t.request.max_new_tokens <= CONTEXT for t in tasks)
        assert all(len(sampling(t).stop_token_ids) <= MAX_STOP_TOKEN_IDS for t in tasks)
    except ApiError as error:
        status = error.status
    assert status in (200, 400, 404)
