"""The shadow policy of a running server: what it says of live requests, and that it never touches one."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from api.metrics import Metrics
from api.shadow import LAG_SECS, LiveShadow, _compare
from api.shadow_metrics import ShadowMeter, ShadowNumbers
from model.engine_types import EngineState, EngineStats, StepRecord
from scheduler import FinishReason, Request, SchedulerConfig
from scheduler.plan import SchedulerStats
from scheduler.policies import BUNDLED
from scheduler.policies.base import Order, Policy
from scheduler.shadow import Shadow
from scheduler.simulation.records import StepShape
from tests.api.fake_engine import SMALL
from tests.api.serving import Served
from tests.api.test_disconnect import read_until, send
from tests.api.tiny import MODEL, completion, is_idle, metric, saying, serving, wait_until

STEP_SECS = 0.004
STEP = StepRecord(1, StepShape(1, 1, 0, 9, 9), 2, 1, STEP_SECS, 0.0)
ONE_SLOT = replace(SMALL, max_num_seqs=1)
COMPARISONS = ("earlier", "later", "same")


@contextmanager
def shadowed(
    shadow: str, live: str = "fcfs", step_secs: float = STEP_SECS, options: dict[str, Any] | None = None
) -> Iterator[Served]:
    """A server whose engine has one slot, so that order is all that matters."""
    section = {"max_num_seqs": 1, "waiting_queue_policy": live, "shadow_policy": shadow}
    section |= {"max_num_batched_tokens": 64, "shadow_policy_options": options or {}, "preempt_running": False}
    settings = {"scheduler_config": section, "max_model_len": 256}
    engine = replace(ONE_SLOT, waiting_queue_policy=live, preempt_running=False)
    with serving(saying("abc", end=False), settings=settings, scheduler=engine, step_secs=step_secs) as server:
        yield server


def together(server: Served, bodies: Sequence[dict[str, Any]]) -> None:
    """Send requests in this order, the first of which should be long enough for the others to find it running."""

    def post(body: dict[str, Any]) -> int:
        with server.client() as client:
            return client.post("/v1/completions", json=body).status_code

    before = len(server.engine.submitted)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = []
        for count, body in enumerate(bodies, 1):
            answers.append(pool.submit(post, body))
            wait_until(lambda count=count: len(server.engine.submitted) == before + count)
        assert {answer.result() for answer in answers} == {200}
    wait_until(lambda: is_idle(server))


def compared(server: Served, policy: str) -> dict[str, int]:
    return {name: int(metric(server, "shadow_requests_total", policy=policy, first_token=name)) for name in COMPARISONS}


def predicted(server: Served, policy: str, priority_class: str, what: str = "count") -> float:
    name = f"shadow_time_to_first_token_seconds_{what}"
    return metric(server, name, policy=policy, priority_class=priority_class)


# -- what it says -----------------------------------------------------------------------------------------------------


def test_priority_under_a_live_fcfs() -> None:
    """HIGH would have overtaken, LOW been overtaken, and both keep their real lengths in the other order."""
    bodies = [completion(max_tokens=60, priority=0.5)]
    bodies += [completion(max_tokens=20, priority=0.0) for _ in range(4)]
    bodies += [completion(max_tokens=20, priority=1.0) for _ in range(4)]
    with shadowed("priority") as server:
        together(server, bodies)
        wait_until(lambda: sum(compared(server, "priority").values()) == 9)
        assert compared(server, "priority") == {"earlier": 4, "later": 4, "same": 1}
        for name, count in (("low", 4), ("default", 1), ("high", 4)):
            assert predicted(server, "priority", name) == count
        for name, overtaken_by in (("low", 4), ("high", -4)):
            live = metric(server, "time_to_first_token_seconds_sum", priority_class=name)
            steps_later = (predicted(server, "priority", name, "sum") - live) / 4 / STEP_SECS
            assert steps_later == pytest.approx(20 * overtaken_by, rel=0.25)
        assert metric(server, "shadow_num_requests_waiting", policy="priority") == 0
        assert metric(server, "shadow_dropped_events_total", policy="priority") == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_live_policy_as_its_own_shadow(policy: str) -> None:
    bodies = [completion(max_tokens=100)]
    bodies += [completion([65] * (5 + n), max_tokens=1 + 5 * (n % 5), priority=(n % 3) / 2) for n in range(19)]
    with shadowed(policy, policy) as server:
        together(server, bodies)
        wait_until(lambda: sum(compared(server, policy).values()) == 20)
        assert compared(server, policy)["same"] >= 18


def test_what_is_rendered() -> None:
    with shadowed("priority") as server, server.client() as client:
        assert client.post("/v1/completions", json=completion(max_tokens=2)).status_code == 200
        wait_until(lambda: compared(server, "priority")["same"] == 1)
        text = client.get("/metrics").text
        assert client.get("/server_info").json()["shadow"] == {"policy": "priority", "is_on": True}
    labels = f'model_name="{MODEL}",policy="priority"'
    for line in (
        f'twinmesh_shadow_requests_total{{first_token="same",{labels}}} 1.0',
        f'twinmesh_shadow_requests_total{{first_token="later",{labels}}} 0.0',
        f'twinmesh_shadow_time_to_first_token_seconds_count{{{labels},priority_class="default"}} 1.0',
        f"twinmesh_shadow_preemptions_total{{{labels}}} 0.0",
        f"twinmesh_shadow_dropped_events_total{{{labels}}} 0.0",
        f"twinmesh_shadow_num_requests_waiting{{{labels}}} 0.0",
        "# TYPE twinmesh_shadow_requests_total counter",
        "# TYPE twinmesh_shadow_num_requests_waiting gauge",
    ):
        assert line in text.splitlines()
    assert server.state.shadow is not None
    assert not server.state.shadow.is_on


def test_nothing_without_a_shadow() -> None:
    with serving() as server, server.client() as client:
        client.post("/v1/completions", json=completion(max_tokens=2))
        assert "shadow" not in client.get("/metrics").text
        assert client.get("/server_info").json()["shadow"] is None


def test_clients_that_leave() -> None:
    """One that runs and one that waits: neither is kept, and the one without a token is compared with nothing."""
    with shadowed("priority") as server:
        running = send(server, "/v1/completions", completion(max_tokens=200, stream=True))
        read_until(running, b"data: ")
        waiting = send(server, "/v1/completions", completion(max_tokens=200, priority=1.0))
        wait_until(lambda: len(server.engine.submitted) == 2)
        time.sleep(LAG_SECS)
        waiting.close()
        wait_until(lambda: server.engine.stats().scheduler.num_waiting == 0)
        running.close()
        wait_until(lambda: is_idle(server))
        with server.client() as client:
            assert client.post("/v1/completions", json=completion(max_tokens=2)).status_code == 200
        wait_until(lambda: sum(compared(server, "priority").values()) == 2)
        shadow = server.state.shadow
        assert shadow is not None
        assert shadow._twins is not None
        wait_until(lambda: not shadow._twins._followed)
        wait_until(lambda: not shadow._twins._shadow._twins)


@pytest.mark.parametrize(
    ("predicted_at", "came_at", "wanted"),
    [
        (10.009, 10.001, "same"),
        (10.02, 10.001, "later"),
        (10.001, 10.02, "earlier"),
        (20.9, 20.0, "same"),
        (21.1, 20.0, "later"),
        (18.9, 20.0, "earlier"),
    ],
)
def test_the_same_is_within_ten_per_cent_or_ten_milliseconds(predicted_at: float, came_at: float, wanted: str) -> None:
    assert _compare(predicted_at, came_at, 10.0) == wanted


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Failing(Order):
    """Fails when the third request comes."""

    def __init__(self) -> None:
        self.count = 0

    def waiting_key(self, request: Request) -> float:
        self.count += 1
        if self.count > 2:
            raise RuntimeError("no order today")
        return 0.0


def test_a_shadow_that_fails_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED, "failing", lambda config: Policy("failing", Failing()))
    with capture_logs() as logs, shadowed("failing") as server, server.client() as client:
        together(server, [completion(max_tokens=5) for _ in range(5)])
        wait_until(lambda: client.get("/server_info").json()["shadow"] == {"policy": "failing", "is_on": False})
        assert client.get("/ready").status_code == 200
        together(server, [completion(max_tokens=5) for _ in range(5)])
        assert client.get("/metrics").status_code == 200
        assert metric(server, "request_success_total", finished_reason="length") == 10
        assert not server.state.shadow._queue  # type: ignore[union-attr]
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(entry["event"], entry["policy"]) for entry in errors] == [
        ("the shadow policy has failed and is switched off", "failing")
    ]


def meter_of(shadow: LiveShadow) -> tuple[Metrics, ShadowMeter]:
    metrics = Metrics()
    stats = EngineStats(SchedulerStats(0, 0, 0, 1, 0, 0, 0), EngineState.READY, None, 0, 0, True)
    metrics.bind("m", lambda: stats)
    return metrics, metrics.bind_shadow("fcfs", shadow.numbers)


def request(name: str) -> Request:
    return Request(name, (1, 2, 3), 50, arrival_time=time.monotonic())


@contextmanager
def begun(**options: Any) -> Iterator[tuple[LiveShadow, Callable[[str], float]]]:
    """A shadow without a server, and what its metrics show."""
    shadow = LiveShadow("fcfs", **options)
    metrics, meter = meter_of(shadow)

    def shown(start: str) -> float:
        lines = [line for line in metrics.render()[0].decode().splitlines() if line.startswith(f"twinmesh_{start}")]
        return float(lines[0].rpartition(" ")[2])

    shadow.begin(SchedulerConfig(max_num_seqs=1), meter)
    try:
        yield shadow, shown
    finally:
        shadow.close()
        shadow.close()


def live_one(shadow: LiveShadow, name: str) -> None:
    """One request that has its whole life now."""
    follower = shadow.follower(request(name))
    follower.on_queued(time.monotonic())
    follower.on_tokens(1, time.monotonic())
    follower.on_finished(FinishReason.STOP, time.monotonic())
    follower.on_finished(FinishReason.STOP, time.monotonic())


def test_a_full_queue_drops_counts_and_starts_over() -> None:
    with capture_logs() as logs, begun(queue_size=20) as (shadow, shown):
        shadow.on_step(STEP)
        live_one(shadow, "before")
        wait_until(lambda: shown('shadow_requests_total{first_token="same"') == 1)
        first = shadow._twins._shadow  # type: ignore[union-attr]
        for number in range(30):
            live_one(shadow, f"lost-{number}")
        assert len(shadow._queue) <= 20
        wait_until(lambda: shadow._twins._shadow is not first)  # type: ignore[union-attr]
        wait_until(lambda: shadow.numbers().num_dropped_events >= 60)
        assert not shadow._twins._followed  # type: ignore[union-attr]
        live_one(shadow, "after")
        wait_until(lambda: shown('shadow_requests_total{first_token="same"') == 2)
        assert shown("shadow_dropped_events_total") == shadow.numbers().num_dropped_events == 60
        assert shadow.is_on
    assert [entry["log_level"] for entry in logs] == ["info", "warning"]


def test_steps_that_are_missed_leave_room_for_requests() -> None:
    with begun(queue_size=20) as (shadow, shown):
        for _ in range(1000):
            shadow.on_step(STEP)
        live_one(shadow, "a")
        first = shadow._twins
        wait_until(lambda: shown('shadow_requests_total{first_token="same"') == 1)
        assert shadow.numbers().num_dropped_events > 900
        assert shadow._twins is first


def test_a_request_whose_end_is_never_told_holds_it_up_only_so_long() -> None:
    with begun(queue_size=20) as (shadow, shown):
        shadow.on_step(STEP)
        shadow.follower(request("for ever")).on_queued(time.monotonic())
        for number in range(25):
            time.sleep(0.02)
            live_one(shadow, f"behind-{number}")
        wait_until(lambda: shadow.numbers().num_dropped_events > 0)
        live_one(shadow, "after")
        wait_until(lambda: shown('shadow_requests_total{first_token="same"') > 0)


def test_a_request_that_was_refused_is_never_heard_of() -> None:
    with begun() as (shadow, _):
        shadow.follower(request("refused"))
        assert not shadow._queue


def test_nothing_is_kept_after_the_end() -> None:
    with begun() as (shadow, _):
        pass
    live_one(shadow, "late")
    shadow.on_step(STEP)
    assert not shadow._queue
    assert shadow.numbers() == ShadowNumbers(0, 0, 0)


def test_preemptions_survive_a_new_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "num_preemptions", property(lambda self: 3))
    with begun(queue_size=4) as (shadow, shown):
        wait_until(lambda: shown("shadow_preemptions_total") == 3)
        for number in range(9):
            live_one(shadow, f"lost-{number}")
        wait_until(lambda: shown("shadow_preemptions_total") == 6)
