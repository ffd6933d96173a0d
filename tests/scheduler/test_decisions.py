"""Why a request waits or was put back: the log of decisions and what it says."""

from scheduler import Scheduler
from scheduler.decisions import Decision, DecisionKind, DecisionLog
from tests.scheduler.driver import Driver, make_request, make_scheduler


def logged(**fields: object) -> Scheduler:
    return Scheduler(make_scheduler(**fields).config, log=DecisionLog())


def test_without_a_log_nothing_is_explained():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"), 0.0)
    assert scheduler.explain("a", 1.0) is None


def test_a_waiting_request_hears_who_goes_before_it_and_what_stops_the_first():
    driver = Driver(logged(max_num_seqs=1))
    driver.add(make_request("a"), make_request("b"), make_request("c"))
    driver.step()
    first, second = driver.scheduler.explain("b", 9.0), driver.scheduler.explain("c", 9.0)
    assert (first.position, first.ahead, first.num_waiting) == (1, (), 2)
    assert "next to start" in first.summary
    assert "slot" in first.summary
    assert (second.position, second.ahead) == (2, ("b",))
    assert second.summary.startswith("1 go before it")
    assert "slot" in second.obstacle
    assert second.waited_secs > 0


def test_a_preempted_request_hears_for_whom():
    driver = Driver(logged(max_num_seqs=1, waiting_queue_policy="priority"))
    driver.add(make_request("low", priority=0.0))
    driver.step()
    driver.add(make_request("high", priority=1.0))
    driver.step()
    told = driver.scheduler.explain("low", 9.0)
    assert told.status == "preempted"
    assert told.num_preemptions == 1
    assert "more important" in told.summary
    kinds = [(decision.kind, decision.by) for decision in told.decisions]
    assert kinds == [(DecisionKind.QUEUED, None), (DecisionKind.STARTED, None), (DecisionKind.PUT_BACK, "high")]
    assert driver.scheduler.explain("high", 9.0).status == "running"


def test_pages_are_named_when_they_are_what_is_missing():
    driver = Driver(logged(max_num_seqs=4, num_pages=4, page_size=4))
    driver.add(make_request("a", 12, 4), make_request("b", 8, 4))
    driver.step()
    assert "pages" in driver.scheduler.explain("b", 1.0).obstacle


def test_one_that_ended_is_remembered_for_a_while():
    driver = Driver(logged())
    driver.add(make_request("a", 8, 2))
    for _ in range(4):
        driver.step()
    told = driver.scheduler.explain("a", 9.0)
    assert told.status == "finished"
    assert "length" in told.summary
    assert driver.scheduler.explain("nobody", 9.0) is None


def test_the_log_is_bounded():
    log = DecisionLog(per_request=3, num_ended=2)
    for name in "abc":
        for time in range(5):
            log.record(name, Decision(float(time), DecisionKind.STARTED, "again"))
        log.record(name, Decision(9.0, DecisionKind.ENDED, "stop"))
    assert log.decisions("a") == ()
    assert [len(log.decisions(name)) for name in "bc"] == [3, 3]
