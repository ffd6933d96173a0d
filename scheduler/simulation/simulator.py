"""The event loop of a simulation: arrivals, ends of steps, ends of transfers, in order of virtual time.

Called by `scheduler/cli/` and by tests. Everything that decides is `scheduler.Scheduler` itself (one in each
`Replica`); here is only what surrounds it: workload, routers, link, and the record of what became of each request.
Deterministic: events at the same time go in the order in which they were caused.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace

from scheduler.errors import NeverFitsError, QueueFullError
from scheduler.plan import Event
from scheduler.request import FinishReason, Request
from scheduler.simulation.records import Arrival, Outcome, RunResult, Workload
from scheduler.simulation.replica import Replica
from scheduler.simulation.routers import Router, make_router
from scheduler.simulation.topology import Disaggregated, Pool, Topology, Unified

_UNIQUE_TOKENS = 1 << 60
_PROGRESS_EVERY = 256

Predictor = Callable[[Arrival], float | None]


class Simulator:
    """One run. Build it, call `run` once.

    Args:
        topology: the engines.
        workload: the requests; used up by the run.
        predictor: what a length predictor would say of a request's output, in tokens, or None for no prediction.
        pipelined: whether engines plan a step before they know the results of the one before (the real one does).
        record_steps: keep the time line of steps (large).
        until: no event after this many seconds is processed; requests still open then stay unfinished.
    """

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        *,
        predictor: Predictor = lambda arrival: None,
        pipelined: bool = True,
        record_steps: bool = False,
        until: float = float("inf"),
    ):
        self._topology = topology
        self._workload = workload
        self._predictor = predictor
        self._until = until
        self._record_steps = record_steps
        self._pipelined = pipelined
        self._now = 0.0
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._num_events = 0
        self._requests: dict[str, Request] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._num_open = 0
        self._num_unique = 0
        if isinstance(topology, Unified):
            self._entry = self._make_pool("engine", topology.pool)
            self._generation = self._entry
        else:
            self._entry = self._make_pool("context", topology.context)
            self._generation = self._make_pool("generation", topology.generation)
        self._entry_router = self._make_router(self._entry, topology)
        self._generation_router = self._make_router(self._generation, topology)
        self._link_free_at = [0.0] * len(self._entry)

    def run(self, on_progress: Callable[[int, int], None] = lambda finished, arrived: None) -> RunResult:
        """Simulate to the end. `on_progress(ended, arrived)` is called now and then."""
        arrivals = self._workload.arrivals()
        self._await_arrival(arrivals)
        while self._events:
            time, _, _, action = heapq.heappop(self._events)
            if time > self._until:
                break
            self._now = time
            action()
            if self._num_events % _PROGRESS_EVERY == 0:
                on_progress(len(self._outcomes) - self._num_open, len(self._outcomes))
        on_progress(len(self._outcomes) - self._num_open, len(self._outcomes))
        replicas = {id(replica): replica for replica in (*self._entry, *self._generation)}.values()
        stats = [replica.scheduler.stats() for replica in replicas]
        return RunResult(
            outcomes=list(self._outcomes.values()),
            duration=self._now,
            steps=sorted((span for replica in replicas for span in replica.spans or ()), key=lambda span: span.start),
            num_steps=sum(replica.num_steps for replica in replicas),
            num_prefix_queries=sum(entry.prefix_cache_queries for entry in stats),
            num_prefix_hits=sum(entry.prefix_cache_hits for entry in stats),
        )

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _make_pool(self, kind: str, pool: Pool) -> list[Replica]:
        replicas = []
        for index in range(pool.num_replicas):
            replica = Replica(f"{kind}-{index}", pool.config, pool.cost, self._pipelined)
            replica.spans = [] if self._record_steps else None
            replicas.append(replica)
        return replicas

    def _make_router(self, replicas: list[Replica], topology: Topology) -> Router:
        if isinstance(topology, Unified):
            pool = topology.pool
        else:
            pool = topology.context if replicas is self._entry else topology.generation
        return make_router(pool.router, pool.config.page_size)

    # -- events -------------------------------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[], None], is_last: bool = False) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (max(time, self._now), is_last, self._num_events, action))

    def _await_arrival(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return

        def arrive() -> None:
            self._arrive(arrival)
            self._await_arrival(arrivals)

        self._at(arrival.time, arrive)

    def _arrive(self, arrival: Arrival) -> None:
        outcome = Outcome(arrival, queued_at=self._now)
        self._outcomes[arrival.request_id] = outcome
        self._num_open += 1
        index = self._entry_router.choose(arrival, self._entry)
        disaggregated = self._generation is not self._entry
        request = Request(
            arrival.request_id,
            self._prompt(arrival),
            1 if disaggregated else _bound(arrival),
            arrival_time=self._now,
            priority=arrival.priority,
            tenant=arrival.tenant,
            predicted_new_tokens=self._predictor(arrival),
        )
        self._add(self._entry[index], request, 1 if disaggregated else arrival.output_length)

    def _add(self, replica: Replica, request: Request, output_length: int) -> None:
        outcome = self._outcomes[request.request_id]
        outcome.replica = replica.name
        try:
            replica.add(request, output_length, self._now)
        except (QueueFullError, NeverFitsError):
            self._end(outcome, "refused")
            return
        self._requests[request.request_id] = request
        # After whatever else happens at this moment, so that requests that come together start together.
        self._at(self._now, lambda: self._schedule_end(replica, replica.wake(self._now)), is_last=True)

    def _schedule_end(self, replica: Replica, ends_at: float | None) -> None:
        if ends_at is not None:
            self._at(ends_at, lambda: self._end_step(replica))

    def _end_step(self, replica: Replica) -> None:
        events, ends_at = replica.end_step(self._now)
        # Before what the events cause: followups that arrive now may not join a step that is planned already.
        self._schedule_end(replica, ends_at)
        now = self._now
        for event in events:
            outcome = self._outcomes[event.request_id]
            if event.token_id is not None:
                if outcome.first_token_at is None:
                    outcome.first_token_at = now
                outcome.token_times.append(now)
            if event.finish_reason is not None:
                self._leave(replica, outcome, event)

    def _leave(self, replica: Replica, outcome: Outcome, event: Event) -> None:
        request = self._requests.pop(event.request_id)
        outcome.num_preemptions += request.num_preemptions
        outcome.num_wasted_tokens += request.num_lost_tokens
        if replica in self._entry:
            outcome.num_cached_tokens = request.num_cached_tokens
            outcome.started_at = request.first_started_at
            if self._generation is not self._entry and outcome.arrival.output_length > 1:
                self._transfer(replica, outcome, request)
                return
        arrival = outcome.arrival
        reason = FinishReason.STOP if _bound(arrival) > arrival.output_length else FinishReason.LENGTH
        self._end(outcome, reason.value)

    def _transfer(self, replica: Replica, outcome: Outcome, request: Request) -> None:
        if not isinstance(self._topology, Disaggregated):
            raise TypeError("only a disaggregated topology transfers")
        link, sender = self._topology.link, self._entry.index(replica)
        starts_at = max(self._now, self._link_free_at[sender])
        sent_at = starts_at + request.num_prompt_tokens * link.kv_bytes_per_token / link.bytes_per_second
        self._link_free_at[sender] = sent_at
        outcome.transfer_seconds = sent_at + link.latency_secs - self._now
        self._at(sent_at + link.latency_secs, lambda: self._generate(outcome, request))

    def _generate(self, outcome: Outcome, done: Request) -> None:
        arrival = outcome.arrival
        index = self._generation_router.choose(arrival, self._generation)
        request = Request(
            arrival.request_id,
            (*done.prompt_token_ids, *done.output_token_ids),
            _bound(arrival) - 1,
            arrival_time=arrival.time,
            priority=arrival.priority,
            tenant=arrival.tenant,
            predicted_new_tokens=self._predictor(arrival),
            num_transferred_tokens=done.num_prompt_tokens,
        )
        self._add(self._generation[index], request, arrival.output_length - 1)

    def _end(self, outcome: Outcome, reason: str) -> None:
        outcome.finish_reason = reason
        if reason != "refused":
            outcome.finished_at = self._now
        self._num_open -= 1
        for following in self._workload.followups(outcome.arrival, self._now):
            self._follow(following)

    def _follow(self, arrival: Arrival) -> None:
        later = arrival if arrival.time >= self._now else replace(arrival, time=self._now)
        self._at(later.time, lambda: self._arrive(later))

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _prompt(self, arrival: Arrival) -> tuple[int, ...]:
        """Token ids that agree between two requests exactly as far as their hash ids do."""
        ids: list[int] = []
        size = arrival.block_size
        for block in arrival.hash_ids:
            start = block * size
            ids.extend(range(start, start + size))
        missing = arrival.input_length - len(ids)
        if missing <= 0:
            return tuple(ids[: arrival.input_length])
        self._num_unique += 1
        start = _UNIQUE_TOKENS + self._num_unique * (1 << 20)
        return (*ids, *range(start, start + missing))


def _bound(arrival: Arrival) -> int:
    """Tokens that the client allows."""
    return arrival.output_length if arrival.max_new_tokens is None else arrival.max_new_tokens
