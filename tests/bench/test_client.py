"""The load client against a stub: what it counts, what it calls a failure, and how it treats connections."""

import json
import random

import pytest

from bench.http_client import Endpoint, HttpClient
from bench.load import Limits, closed_loop, open_loop
from bench.workload import Workload
from tests.bench.stub_server import StubServer

QUICK = Limits(max_requests=6, duration_secs=5, drain_secs=5)
FAILING = Limits(max_requests=2, duration_secs=5, drain_secs=5)


async def drive(stub, concurrency=2, limits=QUICK, **changes):
    rng = random.Random(1)
    workload = Workload("stub", prompt_len=5, max_tokens=4, **changes)
    async with stub.running(), HttpClient(Endpoint.parse(stub.url)) as client:
        return await closed_loop(client, lambda: workload.request(rng), concurrency, limits)


@pytest.mark.parametrize("route", ["completions", "chat"])
async def test_counts_tokens_and_times(route):
    stub = StubServer(token_secs=0.01)
    result = await drive(stub, route=route)
    assert len(result.records) == 6
    assert not result.failures
    for record in result.records:
        assert (record.tokens.prompt, record.tokens.completion, record.output_tokens) == (5, 4, 4)
        assert len(record.text_times) == 4
        assert record.started < record.text_times[0] < record.text_times[3] <= record.ended
        assert record.text_times[3] - record.text_times[0] >= 0.01
    assert stub.connections == 2
    assert result.wall_secs < 5


async def test_prompts_are_unique_and_of_the_length_asked_for():
    stub = StubServer()
    await drive(stub, extra={"top_k": 3}, temperature=0.5)
    prompts = [body["prompt"] for body in stub.bodies]
    assert len(set(prompts)) == len(prompts) == 6
    assert {len(prompt.split()) for prompt in prompts} == {5}
    assert {body["top_k"] for body in stub.bodies} == {3}
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in stub.bodies)


@pytest.mark.parametrize(
    "settings",
    [
        {"newline": "\r\n"},
        {"piece_bytes": 1},
        {"piece_bytes": 7, "newline": "\r\n"},
        {"is_delimited": False},
        {"is_delimited": False, "piece_bytes": 3},
    ],
)
async def test_any_framing_gives_the_same_counts(settings):
    result = await drive(StubServer(**settings))
    assert not result.failures
    assert [record.output_tokens for record in result.records] == [4] * 6
    assert all(len(record.text_times) == 4 for record in result.records)


@pytest.mark.parametrize("settings", [{"says_close": True}, {"closes_silently": True}])
async def test_a_closed_keep_alive_connection_is_replaced(settings):
    stub = StubServer(**settings)
    result = await drive(stub, concurrency=1)
    assert not result.failures
    assert len(result.records) == len(stub.bodies) == stub.connections == 6


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [
        ("status", "HTTP 500", "broken"),
        ("event", "stream", "the engine has stopped"),
        ("cut", "connection", "lost"),
        ("garbage", "connection", "not an HTTP answer"),
    ],
)
async def test_failures_are_counted_and_never_records(fault, reason, message):
    result = await drive(StubServer(fault=fault), limits=FAILING)
    assert not result.records
    assert [failure.reason for failure in result.failures] == [reason] * 2
    assert message in result.failures[0].message


async def test_a_stream_that_ends_early_without_a_length_is_a_failure():
    result = await drive(StubServer(fault="cut", is_delimited=False), limits=FAILING)
    assert {failure.message for failure in result.failures} == {"the stream ended without a finish_reason"}


async def test_a_silent_server_ends_with_the_drain_time():
    result = await drive(StubServer(fault="silent"), limits=Limits(10, 0.1, 0.1))
    assert [failure.reason for failure in result.failures] == ["timeout"] * 2


async def test_nobody_listens():
    async with HttpClient(Endpoint.parse("http://127.0.0.1:9")) as client:
        result = await closed_loop(client, lambda: Workload("m").request(random.Random(0)), 1, FAILING)
    assert [failure.reason for failure in result.failures] == ["connection"] * 2


async def test_duration_ends_a_closed_loop():
    result = await drive(StubServer(token_secs=0.01), limits=Limits(10**6, 0.2, 5))
    assert 1 <= len(result.records) < 20
    assert result.wall_secs < 2


async def test_open_loop_keeps_its_rate_and_its_bounds():
    rng = random.Random(3)
    workload = Workload("stub", prompt_len=2, max_tokens=2)
    async with StubServer(token_secs=0.05).running() as stub, HttpClient(Endpoint.parse(stub.url)) as client:
        result = await open_loop(client, lambda: workload.request(rng), 200.0, Limits(40, 5, 5), rng)
        assert len(result.records) == 40
        assert result.wall_secs < 2
        by_time = await open_loop(client, lambda: workload.request(rng), 50.0, Limits(10**6, 0.3, 5), rng)
        assert 3 <= len(by_time.records) <= 40
        full = await open_loop(client, lambda: workload.request(rng), 500.0, Limits(20, 5, 5), rng, max_in_flight=1)
    assert {failure.reason for failure in full.failures} == {"not sent: too many in flight"}
    assert len(full.records) + len(full.failures) == 20


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("localhost:81/v1/", ("localhost", 81, False, "")),
        ("https://host/base/v1", ("host", 443, True, "/base")),
        ("http://[::1]:5", ("::1", 5, False, "")),
    ],
)
def test_urls(url, expected):
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.is_tls, endpoint.base_path) == expected


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port"])
def test_bad_urls(url):
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        Endpoint.parse(url)


def test_a_body_is_json_with_the_priority_asked_for():
    planned = Workload("m", prompt_len=3).request(random.Random(0), "HIGH", 1.0)
    assert json.loads(planned.body)["priority"] == 1.0
    assert planned.label == "HIGH"
    assert "priority" not in json.loads(Workload("m").request(random.Random(0)).body)
