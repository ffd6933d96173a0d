"""Sends requests and notes what happened to each: a closed loop of clients, or an open loop of Poisson arrivals.

Called by `bench/serve.py` and `bench/priority.py`. Every loop ends by a count and by a time, whichever comes first;
what is in flight then may end within `drain_secs`, and is cut off after that.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from bench.completion_stream import CompletionStream, TokenCounts
from bench.http_client import ExchangeError, HttpClient
from bench.workload import PlannedRequest

MAX_FAILURES = 1000
PAUSE_AFTER_FAILURE_SECS = 0.05

NextRequest = Callable[[], PlannedRequest]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a loop ends. No request is begun after `max_requests` of them or `duration_secs`."""

    max_requests: int
    duration_secs: float
    drain_secs: float = 60.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answered request. Times are of `time.perf_counter`.

    `text_times` holds the read time of each event with text: usually one a token, but a server may join tokens.
    """

    label: str
    started: float
    ended: float
    text_times: Sequence[float]
    tokens: TokenCounts
    max_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds from the request being written to its first text."""
        return self.text_times[0] - self.started

    @property
    def output_tokens(self) -> int:
        """As the server counted; without that, events with text."""
        return len(self.text_times) if self.tokens.completion is None else self.tokens.completion


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request without a full answer. `reason` is short and equal for equal causes, `message` is the server's."""

    label: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a loop saw, from its `started` to the end of the last answer. `cpu_secs` is what this process spent."""

    started: float
    ended: float
    cpu_secs: float
    records: Sequence[RequestRecord]
    failures: Sequence[RequestFailure]

    @property
    def wall_secs(self) -> float:
        """From the start to the last answer."""
        return max(self.ended - self.started, 1e-9)


async def closed_loop(client: HttpClient, next_request: NextRequest, concurrency: int, limits: Limits) -> LoadResult:
    """`concurrency` clients, each of which sends its next request when the last one has been answered."""
    run = _Run(client, limits)

    async def one_client() -> None:
        while run.begin():
            if not await run.send(next_request()):
                await asyncio.sleep(PAUSE_AFTER_FAILURE_SECS)

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return run.result()


async def open_loop(
    client: HttpClient, next_request: NextRequest, rate: float, limits: Limits, rng: Random, max_in_flight: int = 1024
) -> LoadResult:
    """Requests begin `rate` times a second on average, whether or not earlier ones have been answered.

    An arrival that finds `max_in_flight` requests open is not sent and counts as a failure.
    """
    run = _Run(client, limits)
    open_requests: set[asyncio.Task[bool]] = set()
    due = time.perf_counter()
    while True:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, min(due, run.ends_at) - time.perf_counter()))
        if due >= run.ends_at or not run.begin():
            break
        if len(open_requests) >= max_in_flight:
            run.refuse(next_request())
            continue
        task = asyncio.create_task(run.send(next_request()))
        open_requests.add(task)
        task.add_done_callback(open_requests.discard)
    await asyncio.gather(*open_requests)
    return run.result()


class _Run:
    """The state of one loop: how many requests have begun, and what came of them."""

    def __init__(self, client: HttpClient, limits: Limits):
        self._client = client
        self._left = limits.max_requests
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()
        self.ends_at = self._started + limits.duration_secs
        self._cut_off_at = self.ends_at + limits.drain_secs
        self._records: list[RequestRecord] = []
        self._failures: list[RequestFailure] = []

    def begin(self) -> bool:
        """Take leave to send one more request; False when the limits are reached."""
        if self._left <= 0 or time.perf_counter() >= self.ends_at or len(self._failures) >= MAX_FAILURES:
            return False
        self._left -= 1
        return True

    def refuse(self, planned: PlannedRequest) -> None:
        """Count a request that was never sent, for which leave was taken."""
        self._fail(planned, "not sent: too many in flight", "")

    async def send(self, planned: PlannedRequest) -> bool:
        """Send one request, for which leave was taken, and note its outcome; whether it was answered in full."""
        stream = CompletionStream()
        try:
            async with asyncio.timeout(max(0.0, self._cut_off_at - time.perf_counter())):
                response = await self._client.post(planned.path, planned.body, stream)
        except TimeoutError:
            return self._fail(planned, "timeout", "")
        except (ExchangeError, OSError) as error:
            return self._fail(planned, "connection", str(error))
        if response.status != 200:
            return self._fail(planned, f"HTTP {response.status}", stream.head.decode("utf-8", "replace"))
        problem = stream.problem()
        if problem is not None:
            return self._fail(planned, "stream", problem)
        counts = stream.counts()
        self._records.append(
            RequestRecord(
                planned.label, response.started, response.ended, stream.text_times, counts, planned.max_tokens
            )
        )
        return True

    def result(self) -> LoadResult:
        """What has been noted so far."""
        ended = max((record.ended for record in self._records), default=time.perf_counter())
        cpu_secs = time.process_time() - self._cpu_started
        return LoadResult(self._started, ended, cpu_secs, tuple(self._records), tuple(self._failures))

    def _fail(self, planned: PlannedRequest, reason: str, message: str) -> bool:
        self._failures.append(RequestFailure(planned.label, reason, message[:400]))
        return False
