"""Faults on purpose: when a point acts, and how."""

import threading

import pytest

from api.config_loading import resolve
from api.faults import Action, Fault, FaultError, FaultPoint, InjectedFault, parse_action
from api.launch import fault_point


def acted(point: FaultPoint, passes: int) -> list[int]:
    """The passes on which the point raised."""
    found = []
    for index in range(passes):
        try:
            point()
        except InjectedFault:
            found.append(index)
    return found


@pytest.mark.parametrize(
    ("after", "count", "expected"), [(0, 1, [0]), (3, 1, [3]), (2, 3, [2, 3, 4]), (4, None, [4, 5, 6, 7]), (9, 1, [])]
)
def test_after_and_count(after: int, count: int | None, expected: list[int]) -> None:
    assert acted(FaultPoint([Fault(Action("raise"), after, count)]), 8) == expected


def test_no_faults_no_effect() -> None:
    assert acted(FaultPoint(), 3) == []


def test_delay_and_exit() -> None:
    slept: list[float] = []
    codes: list[int] = []
    faults = [Fault(parse_action("delay:0.5"), count=2), Fault(parse_action("exit"), after=1)]
    point = FaultPoint(faults, sleep=slept.append, end_process=codes.append)
    for _ in range(3):
        point()
    assert (slept, codes) == ([0.5, 0.5], [1])


def test_hang_until_released() -> None:
    point = FaultPoint([Fault(parse_action("hang"))])
    thread = threading.Thread(target=point, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    point.release()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "text", ["", "explode", "raise:1", "delay", "delay:", "delay:soon", "delay:-1", "delay:nan", "drop"]
)
def test_actions_that_do_not_exist(text: str) -> None:
    with pytest.raises(FaultError):
        parse_action(text)


def test_from_the_configuration() -> None:
    faults = [{"point": "engine.step", "action": "raise", "after": 1, "count": None}]
    config = resolve({"faults": faults}, allow_faults=True)
    assert acted(fault_point(config, "engine.step"), 4) == [1, 2, 3]
    assert acted(fault_point(config, "transfer.send"), 4) == []
