"""The servers that are measured: how they are named on a command line, and what they say of themselves.

Used by `bench/serve.py` and `bench/priority.py`. A server that does not answer here is not measured.
"""

import asyncio
import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from bench.http_client import Endpoint, ExchangeError, HttpClient
from bench.roofline import BYTES, ModelSize

ANSWER_TIMEOUT_SECS = 10.0
MAX_ANSWER_BYTES = 4 << 20


class TargetError(Exception):
    """A server is not named correctly, or does not answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """One server. `model` is empty until it is known, `dtype` (of the weights) unless it was named."""

    name: str
    endpoint: Endpoint
    model: str = ""
    dtype: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `name=url[,model[,dtype]]`. Raises TargetError."""
        name, _, rest = text.partition("=")
        url, model, dtype = (*rest.split(","), "", "")[:3]
        if not name or not url or rest.count(",") > 2:
            raise TargetError(f"not name=url[,model[,dtype]]: {text!r}")
        if dtype and dtype not in BYTES:
            raise TargetError(f"dtype {dtype!r} is none of {', '.join(BYTES)}")
        try:
            return cls(name, Endpoint.parse(url), model, dtype)
        except ValueError as error:
            raise TargetError(str(error)) from error

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, so that this machine's limits are its own."""
        try:
            return ipaddress.ip_address(self.endpoint.host).is_loopback
        except ValueError:
            return self.endpoint.host == "localhost"

    def client(self, headers: Mapping[str, str]) -> HttpClient:
        """A client of this server."""
        return HttpClient(self.endpoint, headers)


class _Collected:
    """A sink that keeps the body."""

    def __init__(self) -> None:
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes, up to a limit."""
        self.body += data[: MAX_ANSWER_BYTES - len(self.body)]


@dataclass(frozen=True, slots=True)
class Answer:
    """A short answer. `body` is the decoded JSON, or None if it is none."""

    status: int
    body: Any


async def ask(client: HttpClient, path: str, body: Mapping[str, Any] | None = None) -> Answer:
    """GET `path`, or POST `body` to it. Raises TargetError if there is no answer in time."""
    sink = _Collected()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_SECS if body is None else 6 * ANSWER_TIMEOUT_SECS):
            if body is None:
                response = await client.get(path, sink)
            else:
                response = await client.post(path, json.dumps(body).encode(), sink)
    except TimeoutError:
        raise TargetError(f"no answer to {path}: it took too long") from None
    except (ExchangeError, OSError) as error:
        raise TargetError(f"no answer to {path}: {error}") from error
    try:
        return Answer(response.status, json.loads(sink.body))
    except ValueError:
        return Answer(response.status, None)


async def with_model(target: Target, client: HttpClient) -> Target:
    """The target with the model's name: the first that the server lists unless one was named. Raises TargetError."""
    if target.model:
        return target
    answer = await ask(client, "/v1/models")
    try:
        return replace(target, model=str(answer.body["data"][0]["id"]))
    except (KeyError, IndexError, TypeError):
        raise TargetError(f"{target.name} lists no model (HTTP {answer.status}): name one") from None


async def model_size(client: HttpClient) -> ModelSize | None:
    """What the server tells of its model's size; None if it has no `/server_info` of ours."""
    answer = await ask(client, "/server_info")
    return ModelSize.from_server_info(answer.body) if isinstance(answer.body, dict) else None


def authorization(api_key_variable: str | None) -> dict[str, str]:
    """The header with the key that an environment variable holds; none if no variable is named. Raises TargetError."""
    if api_key_variable is None:
        return {}
    key = os.environ.get(api_key_variable)
    if not key:
        raise TargetError(f"the environment variable {api_key_variable} is not set")
    return {"Authorization": f"Bearer {key}"}
