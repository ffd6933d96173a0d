"""The official `openai` client against the routes: answers, streams and errors as its own classes."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.api.serving import Served
from tests.api.tiny import MODEL, saying, serving

TEXT = "Hällo, 😀!"
MESSAGES: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(saying(TEXT, "Other.")) as running:
        yield running


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=10
    ) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in answer.choices] == [TEXT, "Other."]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == TEXT


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    usage = None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT, "Other."]
    assert usage is not None
    assert usage.completion_tokens == len(TEXT.encode()) + 1 + len("Other.") + 1


async def test_chat_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=3, echo=True, max_tokens=4)
    assert [choice.text for choice in answer.choices] == ["aHäl", "bHäl"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "H", "", "ä", "l"]
    text = ""
    async for part in await client.completions.create(model=MODEL, prompt="a", stream=True):
        text += part.choices[0].text
    assert text == TEXT


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
async def test_errors(client: openai.AsyncOpenAI, stream: bool) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=MESSAGES, temperature=9, stream=stream)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="other", messages=MESSAGES, stream=stream)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await create(model=MODEL, messages=[], stream=stream)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        await create(model=MODEL, messages=MESSAGES, tools=tools, stream=stream)


async def test_failure_in_a_stream_is_an_exception() -> None:
    """B23 as a user sees it."""
    with serving(saying("abc", end=False), step_secs=0.02) as server:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = 0

        async def read() -> None:
            nonlocal seen
            async for _ in stream:
                seen += 1
                if seen == 4:
                    server.engine.die()

        with pytest.raises(openai.APIError):
            await read()
        await client.close()
    assert seen >= 4


async def test_key() -> None:
    with serving(keys=["right"]) as server:
        for key, outcome in (("wrong", openai.AuthenticationError), ("right", None)):
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)
            if outcome is None:
                assert (await client.chat.completions.create(model=MODEL, messages=MESSAGES)).choices
            else:
                with pytest.raises(outcome):
                    await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            await client.close()
