"""The whole server on a tiny random model: abuse from outside, and a canary after each.

Storms of disconnects, preemption, mixed sampling, overload, boundaries, and the drain.
"""

import asyncio
import json
import random
import signal
import time

import httpx
import pytest

from tests.api.whole_server import WholeServer
from tests.model.checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    "dtype=float32", "max_model_len=128",
    "scheduler_config.max_num_seqs=4", "scheduler_config.max_num_batched_tokens=16",
    "scheduler_config.waiting_queue_policy=priority", "scheduler_config.max_queue_size=400",
    "kv_cache_config.page_size=4", "kv_cache_config.num_pages=48",
)  # fmt: skip
CANARY = {"model": "tiny", "prompt": [5, 17, 40, 9, 31], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_checkpoint("llama_untied", folder)
    with WholeServer(folder, *SETTINGS, "served_model_name=tiny", model=str(model)) as server:
        yield server


@pytest.fixture(scope="module")
def reference(server):
    return httpx.post(f"{server.url}/v1/completions", json=CANARY).json()["choices"][0]["text"]


@pytest.fixture(autouse=True)
def canary(server, reference):
    yield
    if server.process.poll() is None:
        answer = httpx.post(f"{server.url}/v1/completions", json=CANARY, timeout=30)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == reference


def random_body(rng: random.Random, **changes) -> dict:
    prompt = [rng.randrange(3, 100) for _ in range(rng.randint(1, 60))]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randint(1, 60), "priority": rng.choice([0, 0.5, 1.0])}
    extra = rng.choice([{}, {"n": 3}, {"logprobs": 5}, {"temperature": 0}, {"presence_penalty": 1.0, "seed": 5}])
    return body | {"ignore_eos": True} | extra | changes


async def leave_at_random(client: httpx.AsyncClient, rng: random.Random, url: str) -> None:
    body = random_body(rng, stream=rng.random() < 0.7)
    patience = rng.choice([0.0, 0.005, 0.02, 0.1, 0.5])
    try:
        async with asyncio.timeout(patience):
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
    except (TimeoutError, httpx.HTTPError):
        pass


def test_five_hundred_disconnects_leave_nothing_behind(server):
    async def storm() -> None:
        rng = random.Random(11)
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            for _ in range(20):
                await asyncio.gather(*(leave_at_random(client, rng, server.url) for _ in range(25)))

    asyncio.run(storm())
    server.check_at_rest()
    assert server.total("requests_received_total") == server.total("request_success_total")


def test_preemption_storm_gives_everyone_their_own_answer(server):
    rng = random.Random(4)
    bodies = [random_body(rng, temperature=0, n=1, logprobs=None, presence_penalty=0) for _ in range(60)]
    before = server.total("preemptions_total")

    async def ask(together: bool) -> list[str]:
        async with httpx.AsyncClient(timeout=200, limits=httpx.Limits(max_connections=60)) as client:

            async def one(body: dict) -> str:
                answer = await client.post(f"{server.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
                return answer.json()["choices"][0]["text"]

            if together:
                return await asyncio.gather(*map(one, bodies))
            return [await one(body) for body in bodies]

    crowded = asyncio.run(ask(True))
    assert server.total("preemptions_total") > before
    assert asyncio.run(ask(False)) == crowded
    server.check_at_rest()


def test_a_fuzz_compiles_nothing(server):
    compilations = server.total("compilations_total")
    rng = random.Random(9)

    async def fuzz() -> None:
        async with httpx.AsyncClient(timeout=100) as client:
            await asyncio.gather(
                *(
                    client.post(
                        f"{server.url}/v1/completions", json=random_body(rng, top_k=rng.choice([0, 1, 70, 10**7]))
                    )
                    for _ in range(80)
                )
            )

    asyncio.run(fuzz())
    assert server.total("compilations_total") == compilations


def test_two_half_pool_prompts_and_a_prompt_that_never_fits(server):
    async def run() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            calls = [
                client.post(
                    f"{server.url}/v1/completions",
                    json={
                        "model": "tiny",
                        "prompt": [random.Random(i).randrange(3, 100) for _ in range(100)],
                        "max_tokens": 20,
                        "ignore_eos": True,
                    },
                )
                for i in range(4)
            ]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == [200] * 4
    answer = httpx.post(f"{server.url}/v1/completions", json={**CANARY, "prompt": [5] * 120, "max_tokens": 20})
    assert answer.status_code == 400
    assert "128" in answer.json()["error"]["message"]


def test_length_boundaries(server):
    def post(length: int, **fields) -> httpx.Response:
        body = {"model": "tiny", "prompt": [7] * length, "temperature": 0, "ignore_eos": True, **fields}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    for length in (126, 127):
        for fields in ({}, {"max_tokens": None}, {"max_tokens": 128 - length}):
            answer = post(length, **fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 128 - length
        assert post(length, max_tokens=129 - length).status_code == 400
    for length in (128, 129):
        assert post(length).status_code == 400
    assert post(128, max_tokens=0, echo=True).json()["usage"]["completion_tokens"] == 0


def test_seeds_choices_and_streams_agree(server):
    body = {"model": "tiny", "prompt": [9, 8, 7], "max_tokens": 10, "n": 3, "seed": 2**62 + 1, "ignore_eos": True}
    whole = httpx.post(f"{server.url}/v1/completions", json=body).json()
    again = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert [c["text"] for c in whole["choices"]] == [c["text"] for c in again["choices"]]
    assert len({c["text"] for c in whole["choices"]}) > 1
    texts, usage = {}, None
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=streamed) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert [texts[i] for i in range(3)] == [c["text"] for c in whole["choices"]]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 30


def test_end_token_bias_min_tokens_and_ignore_eos(server):
    base = {"model": "tiny", "prompt": [9, 8, 7], "temperature": 0, "logit_bias": {"2": 100}}
    held = httpx.post(f"{server.url}/v1/completions", json={**base, "min_tokens": 7, "max_tokens": 20}).json()
    assert held["usage"]["completion_tokens"] == 8
    assert held["choices"][0]["finish_reason"] == "stop"
    ignored = httpx.post(f"{server.url}/v1/completions", json={**base, "ignore_eos": True, "max_tokens": 20}).json()
    assert ignored["usage"]["completion_tokens"] == 20
    assert (
        httpx.post(f"{server.url}/v1/completions", json={**base, "min_tokens": 9, "max_tokens": 8}).status_code == 400
    )


def test_queue_full_is_429_and_recovers(server):
    body = {
        "model": "tiny",
        "prompt": [[5, i % 90 + 3] for i in range(128)],
        "max_tokens": 40,
        "n": 2,
        "ignore_eos": True,
    }

    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120) as client:
            tasks = [asyncio.ensure_future(client.post(f"{server.url}/v1/completions", json=body)) for _ in range(4)]
            done, pending = await asyncio.wait(tasks, timeout=3)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            return [task.result() for task in done]

    refused = [answer for answer in asyncio.run(flood()) if answer.status_code == 429]
    assert refused
    assert all("retry-after" in answer.headers for answer in refused)
    server.check_at_rest()


def test_drain_lets_streams_finish_and_exits_cleanly(server):
    body = {"model": "tiny", "prompt": [9, 8, 7], "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert _status_or_none(f"{server.url}/v1/completions") in (503, None)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(30) == 0


def _status_or_none(url: str) -> int | None:
    """Status of a request to a draining server; None if it does not listen any more."""
    try:
        return httpx.post(url, json=CANARY, timeout=5).status_code
    except httpx.TransportError:
        return None
