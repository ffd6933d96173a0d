"""A completion server of a few lines, with faults on request: what the tests in tests/bench drive the clients against.

It counts words as tokens, and can serve one request at a time, the highest priority first.
"""

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StubServer:
    """Settings of the server, and what it has seen.

    `fault` is one of: none, `status` (500), `event` (an error event), `cut` (closed mid-stream), `silent` (no answer),
    `endless` (an event without an end is cut off by the connection's end), `garbage` (not HTTP).
    """

    fault: str = "none"
    token_secs: float = 0.0
    closes_silently: bool = False
    says_close: bool = False
    is_delimited: bool = True
    newline: str = "\n"
    piece_bytes: int = 0
    serves_one_at_a_time: bool = False
    lists_models: bool = True
    server_info: dict[str, Any] | None = None
    connections: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    _waiting: list[tuple[float, int, asyncio.Event]] = field(default_factory=list)
    _order: itertools.count = field(default_factory=itertools.count)
    _busy: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["StubServer"]:
        tasks: set[asyncio.Task] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x[15:]) for x in head.lower().split("\r\n") if x.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                await self._answer(head, body, writer)
                if self.closes_silently or self.says_close or not self.is_delimited:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        path = head.split(" ", 2)[1]
        if path == "/v1/models":
            models = {"data": [{"id": "stub"}] if self.lists_models else []}
            return self._write_json(writer, 200, models)
        if path == "/server_info":
            return self._write_json(writer, 200 if self.server_info else 404, self.server_info or {})
        body = json.loads(raw)
        self.bodies.append(body)
        if not 0 <= body.get("priority", 0.5) <= 1:
            return self._write_json(writer, 400, {"error": {"message": "out of range"}})
        if self.fault == "silent":
            await asyncio.sleep(60)
        elif self.fault == "status":
            self._write_json(writer, 500, {"error": {"message": "broken"}})
        elif self.fault == "garbage":
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        elif not body["stream"]:
            self._write_json(writer, 200, {"choices": []})
        else:
            await self._stream(body, writer)

    def _write_json(self, writer: asyncio.StreamWriter, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await self._turn(body.get("priority", 0.5))
        try:
            framing = b"Transfer-Encoding: chunked\r\n" if self.is_delimited else b""
            closing = b"Connection: close\r\n" if self.says_close else b""
            writer.write(b"HTTP/1.1 200 OK\r\n" + framing + closing + b"\r\n")
            for index, event in enumerate(self._events(body)):
                if index == 2 and self.fault in ("cut", "event"):
                    if self.fault == "event":
                        self._write_event(writer, json.dumps({"error": {"message": "the engine has stopped"}}))
                        self._write_end(writer)
                    writer.close()
                    return
                self._write_event(writer, event)
                await asyncio.sleep(self.token_secs)
            self._write_end(writer)
        finally:
            self._next_turn()

    def _events(self, body: dict[str, Any]) -> list[str]:
        is_chat = "messages" in body
        text = body["messages"][0]["content"] if is_chat else body["prompt"]
        events = []
        for index in range(body["max_tokens"]):
            content: dict[str, Any] = {"delta": {"content": "é"}} if is_chat else {"text": "é"}
            reason = "length" if index == body["max_tokens"] - 1 else None
            events.append(json.dumps({"choices": [content | {"finish_reason": reason}]}))
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": body["max_tokens"]}
        return [*events, json.dumps({"choices": [], "usage": usage}), "[DONE]"]

    def _write_event(self, writer: asyncio.StreamWriter, payload: str) -> None:
        data = f"data: {payload}{self.newline}{self.newline}".encode()
        step = self.piece_bytes or len(data)
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.is_delimited else piece)

    def _write_end(self, writer: asyncio.StreamWriter) -> None:
        if self.is_delimited:
            writer.write(b"0\r\n\r\n")

    async def _turn(self, priority: float) -> None:
        if self.serves_one_at_a_time and self._busy:
            mine = asyncio.Event()
            heapq.heappush(self._waiting, (-priority, next(self._order), mine))
            await mine.wait()
        self._busy = True

    def _next_turn(self) -> None:
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._busy = False
