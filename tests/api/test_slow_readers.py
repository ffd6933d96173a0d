"""The bridge from the engine's thread, and streams whose reader is slow or gone: nothing is lost, nobody else waits."""

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.generation.answer import _events
from api.generation.bridge import EventBridge
from api.generation.call import GenerationCall, PlannedChoice
from api.generation.choice import ChoiceRules
from api.generation.detokenize import TokenTables
from api.generation.shapes import CompletionShape, Heading
from api.metrics import Metrics
from api.protocol.errors import InternalError
from api.request_context import RequestContext
from scheduler import Event, FinishReason, Request
from tests.api.fake_engine import FakeEngine
from tests.api.tiny import completion, parse_events, saying, serving, tiny_tokenizer

TEXT = "a text of some length, with 😀 in it. "


def planned(count: int, max_tokens: int, stop: tuple[str, ...] = ()) -> list[PlannedChoice]:
    return [
        PlannedChoice(Request(f"r{i}", (1, 2), max_tokens), ChoiceRules(i, 0, (1, 2), stop_strings=stop))
        for i in range(count)
    ]


def make_call(
    bridge: EventBridge, engine: Any, choices: list[PlannedChoice], interval: int | None = 1
) -> GenerationCall:
    tables = TokenTables(tiny_tokenizer())
    return GenerationCall(choices, engine=engine, bridge=bridge, metrics=Metrics(), tables=tables, interval=interval)


def texts_of(events: str, count: int) -> list[str]:
    texts = [""] * count
    for event in parse_events(events)[:-1]:
        assert isinstance(event, dict)
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def test_unread_text_grows_together() -> None:
    bridge = EventBridge()
    bridge.attach(asyncio.get_running_loop())
    engine = FakeEngine(saying(TEXT, end=False), on_step_done=bridge.flush)
    engine.start()
    call = make_call(bridge, engine, planned(2, 200))
    call.submit(10)
    stream = _events(call, CompletionShape(None).chunks(Heading("id", 1, "m")), False, RequestContext("x"))
    pieces = [(await anext(stream)).decode()]
    while not call.is_over:
        await asyncio.sleep(0.005)
    pieces.extend([piece.decode() async for piece in stream])
    engine.stop()
    expected = (TEXT.encode() * 5)[:200].decode(errors="ignore")
    assert texts_of("".join(pieces), 2) == [expected, expected]
    assert len(pieces) == 2


async def test_stop_string_ends_the_request_though_nobody_reads() -> None:
    bridge = EventBridge()
    bridge.attach(asyncio.get_running_loop())
    engine = FakeEngine(saying(TEXT, end=False), on_step_done=bridge.flush, step_secs=0.002)
    engine.start()
    call = make_call(bridge, engine, planned(1, 200, ("text",)))
    call.submit(10)
    while not call.is_over:
        await asyncio.sleep(0.005)
    assert engine.stats().scheduler.num_running == 0
    assert call.choices[0].stream.take().text == "a "
    engine.stop()


async def test_one_wake_up_a_step() -> None:
    loop = asyncio.get_running_loop()
    bridge = EventBridge()
    bridge.attach(loop)
    wake_ups = 0
    schedule = loop.call_soon_threadsafe

    def counted(*args: Any) -> Any:
        nonlocal wake_ups
        wake_ups += 1
        return schedule(*args)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
    seen: list[str] = []
    boxes = [bridge.open_mailbox(lambda events, _: seen.extend(e.request_id for e in drain(events))) for _ in range(5)]

    def step() -> None:
        bridge.flush()
        for box in boxes:
            for token in range(3):
                box.put(Event("r", token, finish_reason=FinishReason.LENGTH if token == 2 else None))
        bridge.flush()

    await asyncio.to_thread(step)
    await asyncio.sleep(0)
    loop.call_soon_threadsafe = schedule  # type: ignore[method-assign]
    assert (len(seen), wake_ups) == (15, 2)  # the second wake-up is `to_thread`'s


def drain(events: deque[Event]) -> list[Event]:
    drained = list(events)
    events.clear()
    return drained


async def test_last_event_from_another_thread_needs_no_flush() -> None:
    bridge = EventBridge()
    bridge.attach(asyncio.get_running_loop())
    came = asyncio.Event()
    box = bridge.open_mailbox(lambda events, _: drain(events) and came.set())  # type: ignore[func-returns-value]
    stepped, ended = threading.Event(), threading.Event()
    engine = threading.Thread(target=lambda: (bridge.flush(), stepped.set(), ended.wait(5)))
    engine.start()
    await asyncio.to_thread(stepped.wait)
    threading.Thread(target=box.put, args=[Event("r", finish_reason=FinishReason.ABORT)]).start()
    await asyncio.wait_for(came.wait(), 2)
    ended.set()
    engine.join()


class Recorder:
    """An engine that only takes notes."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.sink: Any = None

    def submit(self, requests: Any, sink: Any) -> None:
        self.sink = sink

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.append(request_id)


async def test_a_bug_in_one_answer_fails_that_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    bridge = EventBridge()
    bridge.attach(asyncio.get_running_loop())
    engines = [Recorder(), Recorder()]
    calls = [make_call(bridge, engine, planned(1, 3), None) for engine in engines]
    for call in calls:
        call.submit(10)
    engines[0].sink(Event("r0", 10**9, prompt_logprobs=5))
    engines[1].sink(Event("r0", 97, finish_reason=FinishReason.LENGTH))
    bridge.flush()
    await calls[1].wait_until_over()
    assert calls[1].choices[0].stream.take().text == "a"
    with pytest.raises(InternalError):
        await calls[0].wait_until_over()
    assert engines[0].aborted == ["r0"]
    calls[0].close()
    calls[1].close()


def test_many_streams_with_readers_that_pause() -> None:
    """B03."""
    with serving(saying(TEXT), step_secs=0.001) as server:

        def read(index: int) -> str:
            received = ""
            with (
                server.client() as client,
                client.stream("POST", "/v1/completions", json=completion(stream=True)) as response,
            ):
                for piece in response.iter_text(64):
                    received += piece
                    if index % 4 == 0 and len(received) % 7 == 0:
                        threading.Event().wait(0.01)
            return texts_of(received, 1)[0]

        with ThreadPoolExecutor(64) as pool:
            assert set(pool.map(read, range(64))) == {TEXT}
