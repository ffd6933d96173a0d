"""The estimate of a step's length must come down again after one slow step: our own sleep must not feed it."""

from types import SimpleNamespace

from model.staging import StepLayout
from model.step_timer import LEAD_SECS, StepTimer

LAYOUT = StepLayout(8, 8, 4, True)


class FakeDevice:
    """A clock that sleeping advances, and steps of a given length."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("model.step_timer.time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self, length: float) -> SimpleNamespace:
        started = self.now
        return SimpleNamespace(layout=LAYOUT, started_at=started, is_done=lambda: self.now >= started + length)


def run(device: FakeDevice, timer: StepTimer, length: float) -> float:
    """One step: wait, plan for 2 ms, wait for the end; returns when planning began, counted from the start."""
    handle = device.step(length)
    timer.await_planning_time(handle)
    planned_at = device.now - handle.started_at
    device.sleep(0.002)
    while not handle.is_done():
        device.sleep(0.0001)
    timer.finished(handle)
    return planned_at


def test_one_slow_step_is_forgotten_at_once(monkeypatch):
    device = FakeDevice(monkeypatch)
    timer = StepTimer(clock=lambda: device.now)
    run(device, timer, 1.0)
    run(device, timer, 0.05)
    assert run(device, timer, 0.05) < 0.05


def test_planning_begins_shortly_before_the_end(monkeypatch):
    device = FakeDevice(monkeypatch)
    timer = StepTimer(clock=lambda: device.now)
    for _ in range(3):
        run(device, timer, 0.1)
    planned_at = run(device, timer, 0.1)
    assert 0.1 - 2 * LEAD_SECS <= planned_at <= 0.1


def test_where_steps_vary_planning_begins_at_the_median_not_at_the_least(monkeypatch):
    """A request that arrives after the planning waits a whole step more."""
    device = FakeDevice(monkeypatch)
    timer = StepTimer(clock=lambda: device.now)
    lengths = [0.2, 0.26, 0.22, 0.3, 0.24] * 20
    for length in lengths:
        run(device, timer, length)
    assert run(device, timer, 0.4) > 0.21


def test_a_kind_of_step_that_was_never_seen_is_waited_for(monkeypatch):
    device = FakeDevice(monkeypatch)
    timer = StepTimer(clock=lambda: device.now)
    assert run(device, timer, 0.5) >= 0.5


def test_duration_is_counted_from_when_the_device_was_free(monkeypatch):
    device = FakeDevice(monkeypatch)
    timer = StepTimer(clock=lambda: device.now)
    first = device.step(0.1)
    second = SimpleNamespace(layout=LAYOUT, started_at=device.now + 0.05, is_done=lambda: True)
    device.sleep(0.1)
    timer.finished(first)
    device.sleep(0.1)
    duration, ended_at = timer.finished(second)
    assert abs(duration - 0.1) < 1e-6
    assert ended_at == device.now


def test_whether_the_device_was_idle_before_a_step(monkeypatch):
    device = FakeDevice(monkeypatch)
    timer = StepTimer(clock=lambda: device.now)
    first = device.step(0.1)
    device.sleep(0.05)
    second = device.step(0.1)
    device.sleep(0.05)
    assert timer.was_idle_before(first)
    timer.finished(first)
    assert not timer.was_idle_before(second)
    device.sleep(0.1)
    timer.finished(second)
    device.sleep(0.001)
    assert timer.was_idle_before(device.step(0.1))
