"""A server's recording of its own run: one line per engine request and step, true, and silent about what was said."""

import contextlib
import json
import resource
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from api.config_loading import resolve
from api.config_sources import ConfigError
from api.followers import Followers
from api.metrics import NoMeter
from api.recording import POLL_SECS, Recording, open_recording
from api.recording_names import RecordingNames
from model.engine_types import EngineDeadError, StepRecord, step_shape
from scheduler import FinishReason, PagePool, Request, Scheduler, SchedulerConfig
from scheduler.costs.samples import read_samples
from scheduler.pages import chain_digest, root_digest
from scheduler.plan import RowResult, StepResult
from scheduler.simulation.records import StepShape
from tests.api.serving import Served
from tests.api.test_disconnect import read_until, send
from tests.api.test_launcher import process
from tests.api.tiny import chat, completion, is_idle, metric, saying, serving, wait_until

STEP = StepRecord(1, StepShape(1, 1, 0, 9, 9), 2, 1, 0.01, time.monotonic())


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text("ascii").splitlines()]


def arrivals(folder: Path) -> list[dict[str, Any]]:
    return sorted(lines(folder, "arrivals.jsonl"), key=lambda line: line["timestamp"])


@contextlib.contextmanager
def recorded(folder: Path, script: Any = None, **options: Any) -> Iterator[Served]:
    with serving(script, settings={"recording": {"path": str(folder)}}, **options) as server:
        yield server
        wait_until(lambda: is_idle(server))


def begun(folder: Path, **options: Any) -> Recording:
    folder.mkdir(exist_ok=True)
    max_bytes = options.pop("max_bytes", 1 << 30)
    config = resolve({"recording": {"path": str(folder), "max_bytes": max_bytes}})
    recording = Recording(config, folder, **options)
    recording.begin("m", "cpu", 8)
    return recording


# -- a run ------------------------------------------------------------------------------------------------------------


def test_one_line_per_engine_request(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "recording"
    shared = list(range(65, 65 + 40))
    with recorded(folder, saying("hello")) as server, server.client() as client:
        first = completion(shared, max_tokens=3)
        assert client.post("/v1/completions", json=first).status_code == 200
        both = completion([[*shared, 9], shared[:20]], n=2, max_tokens=30, priority=1.0)
        assert client.post("/v1/completions", json=both).status_code == 200
        streamed = chat("a streamed prompt", stream=True, stop=["lo"], max_tokens=50, service_tier="flex")
        assert "[DONE]" in client.post("/v1/chat/completions", json=streamed).text
        assert client.post("/v1/completions", json=completion(max_tokens=-1)).status_code == 400
        assert client.get("/server_info").json()["recording"] is True
        wait_until(lambda: is_idle(server))
        received, generated = metric(server, "requests_received_total"), metric(server, "generation_tokens_total")
        steps, tokens = metric(server, "iteration_tokens_count"), metric(server, "iteration_tokens_sum")
    found = arrivals(folder)
    assert len(found) == received == 6
    assert sum(line["output_length"] for line in found) == generated
    assert [line["input_length"] for line in found[:5]] == [40, 41, 41, 20, 20]
    assert [line["output_length"] for line in found] == [3, 6, 6, 6, 6, 5]
    assert [line["finish_reason"] for line in found] == ["length", "stop", "stop", "stop", "stop", "stop"]
    assert [line["max_new_tokens"] for line in found] == [3, 30, 30, 30, 30, 50]
    assert [line["priority"] for line in found] == [0.5, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert found[0]["cached_tokens"] == 0
    assert [line["cached_tokens"] for line in found[1:5]] == [32, 32, 16, 16]
    for line in found:
        assert line["block_size"] == 16
        assert len(line["hash_ids"]) == -(-line["input_length"] // 16)
        assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
        assert (line["num_preemptions"], "tenant" in line) == (0, False)
    ids = [line["hash_ids"] for line in found]
    assert ids[0][:2] == ids[1][:2] == ids[2][:2]
    assert ids[0][0] == ids[3][0] == ids[4][0]
    assert len({*ids[0], *ids[1], *ids[2], *ids[3], *ids[4]}) == 2 + 5
    assert not set(ids[5]) & {*ids[0], *ids[1]}
    samples = list(read_samples(folder / "steps.jsonl"))
    assert (len(samples), sum(sample.shape.num_tokens for sample in samples)) == (steps, tokens)
    ends = [line["end_ms"] for line in lines(folder, "steps.jsonl")]
    assert ends == sorted(ends)


def test_disconnects_and_errors(tmp_path: Path) -> None:
    with recorded(tmp_path / "r", saying("abc", end=False), step_secs=0.005) as server:
        leaving = send(server, "/v1/completions", completion(max_tokens=200, stream=True, n=2))
        read_until(leaving, b"data: ")
        leaving.close()
        wait_until(lambda: is_idle(server))
        server.engine.pause()
        waiting = send(server, "/v1/completions", completion(max_tokens=20))
        wait_until(lambda: len(server.engine.submitted) == 3)
        server.engine.die()
        read_until(waiting, b"generation_failed")
        waiting.close()
        with server.client() as client:
            assert client.post("/v1/completions", json=completion()).status_code == 503
        counted = metric(server, "generation_tokens_total")
    found = arrivals(tmp_path / "r")
    assert [line["finish_reason"] for line in found] == ["abort", "abort", "error"]
    assert sum(line["output_length"] for line in found) == counted > 0
    assert found[2]["output_length"] == 0
    assert found[2]["ttft_ms"] is None
    assert found[2]["e2e_ms"] > 0


def test_what_about_says(tmp_path: Path) -> None:
    with recorded(tmp_path) as server, server.client() as client:
        client.post("/v1/completions", json=completion(max_tokens=2))
        at_first = json.loads((tmp_path / "about.json").read_text())
    about = json.loads((tmp_path / "about.json").read_text())
    end = about.pop("end")
    assert at_first == {**about, "end": None}
    assert (end["reason"], end["arrivals"], end["steps"], end["dropped"]) == ("closed", 1, 2, 0)
    assert (about["format"], about["model"], about["page_size"], about["num_pages"]) == (1, "tiny", 16, 256)
    assert about["scheduler_config"]["waiting_queue_policy"] == "fcfs"
    assert about["scheduler_config"]["max_num_seqs"] == 32
    assert about["versions"]["python"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["about.json", "arrivals.jsonl", "steps.jsonl"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_lines_are_there_within_a_second(tmp_path: Path) -> None:
    with recorded(tmp_path) as server, server.client() as client:
        client.post("/v1/completions", json=completion(max_tokens=2))
        wait_until(lambda: len(lines(tmp_path, "arrivals.jsonl")) == 1, within_secs=8 * POLL_SECS)


def test_nothing_that_was_said_is_in_the_folder(tmp_path: Path) -> None:
    secret = "Zanzibar, said quietly"
    ids = [250, 251, 252, 253] * 8
    with recorded(tmp_path, saying("Xylophone")) as server, server.client() as client:
        client.post("/v1/chat/completions", json=chat(secret, user="mallory@example.org", cache_salt="Salzburg"))
        client.post("/v1/completions", json=completion(ids, max_tokens=40))
        shown = client.get("/server_info").text
    everything = "".join(path.read_text() for path in tmp_path.iterdir())
    for word in ("Zanzibar", "quietly", "Xylophone", "mallory", "example.org", "Salzburg"):
        assert word not in everything
    assert str(tmp_path) not in everything + shown
    found = arrivals(tmp_path)
    # What is left are numbers and the names made for the recording.
    for line in found:
        assert {name for name, value in line.items() if isinstance(value, str)} <= {"tenant", "finish_reason"}
        assert [name for name, value in line.items() if isinstance(value, list)] == ["hash_ids"]
    used = sorted({page for line in found for page in line["hash_ids"]})
    assert used == list(range(len(used)))
    assert len(used) < min(ids)
    tenants = {line.get("tenant") for line in found}
    assert len(tenants) == 2
    assert None in tenants


# -- names ------------------------------------------------------------------------------------------------------------


def shareable_pages(one: Sequence[int], other: Sequence[int], salts: tuple[str | None, str | None]) -> int:
    """Pages of `other` that the scheduler's own cache would find after `one`."""
    pool = PagePool(64, 4)

    def digests(ids: Sequence[int], salt: str | None) -> list[bytes]:
        chain = [root_digest(salt)]
        for end in range(4, len(ids) + 1, 4):
            chain.append(chain_digest(chain[-1], ids[end - 4 : end]))
        return chain[1:]

    known = digests(one, salts[0])
    for page, digest in zip(pool.allocate(len(known)), known, strict=True):
        pool.register(page, digest)
    return len(pool.find(digests(other, salts[1])))


PROMPTS = [
    list(range(12)),
    list(range(11)),
    [*range(8), 99, 98, 97, 96],
    [1, *range(1, 12)],
    [*range(13)],
    [5],
    [0] * 12,
]


@pytest.mark.parametrize("salts", [(None, None), (None, ""), ("a", "a"), ("a", "b"), (None, "a")])
def test_ids_agree_exactly_where_pages_can_be_shared(salts: tuple[str | None, str | None]) -> None:
    for one in PROMPTS:
        for other in PROMPTS:
            names = RecordingNames(4)
            first, second = names.pages(one, salts[0]), names.pages(other, salts[1])
            agreeing = [a == b for a, b in zip(first, second, strict=False)]
            count = shareable_pages(one, other, salts)
            assert agreeing == [True] * count + [False] * (len(agreeing) - count)
            assert len(first) == -(-len(one) // 4)
            assert {*first, *second} == set(range(len({*first, *second})))


def test_names_are_forgotten_beyond_a_bound_tails_first() -> None:
    names = RecordingNames(4, max_known_pages=3)
    first = names.pages(range(12), None)
    assert names.pages([7] * 8, None) == [3, 4]
    again = names.pages(range(12), None)
    assert again[0] == first[0]
    assert min(again[1:]) > 4
    assert len(names._known) == 3


def test_names_differ_between_recordings() -> None:
    one, other = RecordingNames(4), RecordingNames(4)
    assert one.tenant("alice") == one.tenant("alice") != one.tenant("bob")
    assert one.tenant("alice") != other.tenant("alice")
    assert one._digests(range(8), None) != other._digests(range(8), None)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_the_shape_of_a_step() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, num_pages=64, page_size=4))
    scheduler.add_request(Request("a", (1, 2, 3), 5), 0.0)
    plan = scheduler.plan(0.0)
    assert step_shape(plan) == StepShape(1, 3, 3, 3, 9)
    scheduler.commit(plan, StepResult(plan.step_id, (RowResult(7),)), 0.0)
    scheduler.add_request(Request("b", (9,) * 10, 5), 0.0)
    # One drawn token after 3 known ones, and 7 of 10 prompt tokens.
    assert step_shape(scheduler.plan(0.0)) == StepShape(2, 8, 7, 4 + 7, 4 + 7 * 7)


def test_a_single_token_that_draws_is_no_prefill() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, num_pages=64, page_size=4))
    scheduler.add_request(Request("draws", (1,), 5), 0.0)
    scheduler.add_request(Request("scores", (2,), 0), 0.0)
    assert step_shape(scheduler.plan(0.0)) == StepShape(2, 2, 1, 2, 2)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match=r"^recording\.path: .* is not empty"):
        open_recording(resolve({"recording": {"path": str(tmp_path)}}))
    with process("0", "--set", f"recording.path={tmp_path}", wait_until_ready=False) as server:
        assert server.wait(20) == 2
        assert server.stderr.startswith(f"bad configuration: recording.path: {tmp_path} is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/nowhere", "/a\0b"):
        with pytest.raises(ConfigError, match=r"^recording\.path: .* cannot be written to \(.+\)$"):
            open_recording(resolve({"recording": {"path": path}}))
    with process("0", "--set", f"recording.path={tmp_path}/file", wait_until_ready=False) as server:
        assert server.wait(20) == 2
        assert server.stderr.startswith(f"bad configuration: recording.path: {tmp_path}/file cannot be written to")


def test_files_that_appear_meanwhile_are_not_overwritten(tmp_path: Path) -> None:
    recording = open_recording(resolve({"recording": {"path": str(tmp_path)}}))
    assert recording is not None
    (tmp_path / "steps.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match="File exists"):
        recording.begin("m", "cpu", 8)
    recording.close()
    assert (tmp_path / "steps.jsonl").read_text() == "precious"


def test_off_by_default() -> None:
    assert open_recording(resolve({})) is None
    with serving() as server, server.client() as client:
        assert client.get("/server_info").json()["recording"] is False


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    with capture_logs() as logs:
        recording = begun(tmp_path, queue_size=5)
        request = Request("a", (1, 2), 4, arrival_time=time.monotonic())
        for _ in range(2):
            wait_until(lambda: not recording._queue)
            for _ in range(8):
                recording.on_step(STEP)
            recording.recorder(request).on_finished(FinishReason.STOP, time.monotonic())
        wait_until(lambda: not recording._queue)
        recording.close()
    assert recording.num_dropped > 0
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["end"]["dropped"] == recording.num_dropped
    assert about["end"]["steps"] + about["end"]["arrivals"] + recording.num_dropped == 18
    assert len([entry for entry in logs if entry["log_level"] == "warning"]) == 1


def test_it_stops_at_its_size(tmp_path: Path) -> None:
    with capture_logs() as logs:
        recording = begun(tmp_path, max_bytes=1000)
        for _ in range(20):
            recording.on_step(STEP)
        wait_until(lambda: not recording.is_on)
        recording.on_step(STEP)
        recording.close()
    assert 800 < (tmp_path / "steps.jsonl").stat().st_size <= 1000
    end = json.loads((tmp_path / "about.json").read_text())["end"]
    assert (end["reason"], end["steps"]) == ("max_bytes", len(lines(tmp_path, "steps.jsonl")))
    assert [entry["log_level"] for entry in logs] == ["info", "warning"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's files")
def test_a_disk_error_stops_only_the_recording(tmp_path: Path) -> None:
    with process("0.001", "--set", f"recording.path={tmp_path / 'r'}") as server:
        resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (4000, 4000))
        deadline = time.monotonic() + 20
        while server.get("/server_info").json()["recording"]:
            assert server.post(max_tokens=20).status_code == 200
            assert time.monotonic() < deadline
        for _ in range(5):
            assert server.post(max_tokens=20).status_code == 200
        assert server.get("/ready").status_code == 200
        server.signal()
        assert server.wait(10) == 0
        entries = [json.loads(line) for line in server.stderr.splitlines()]
    errors = [entry for entry in entries if entry["level"] == "error"]
    assert [entry["logger"] for entry in errors] == ["api.recording"]
    assert errors[0]["reason"] == "File too large"


def test_a_drain_completes_it(tmp_path: Path) -> None:
    with process("0.001", "--set", f"recording.path={tmp_path / 'r'}") as server:
        assert server.post(max_tokens=20).status_code == 200
        server.signal()
        assert server.wait(10) == 0
    about = json.loads((tmp_path / "r" / "about.json").read_text())
    assert about["end"]["reason"] == "closed"
    assert about["end"]["steps"] == len(lines(tmp_path / "r", "steps.jsonl")) >= 20


def test_a_bug_in_the_writer_stops_only_the_recording(tmp_path: Path) -> None:
    recording = begun(tmp_path)
    with capture_logs() as logs:
        recording.on_step(SimpleNamespace())  # type: ignore[arg-type]
        wait_until(lambda: not recording.is_on)
        recording.on_step(STEP)
        recording.close()
    assert [entry["log_level"] for entry in logs] == ["error"]


def test_a_refused_request_leaves_no_line(tmp_path: Path) -> None:
    with recorded(tmp_path) as server, server.client() as client:
        server.engine.submit = _refuse  # type: ignore[method-assign]
        assert client.post("/v1/completions", json=completion()).status_code == 503
    assert arrivals(tmp_path) == []


def _refuse(*_arguments: object) -> None:
    raise EngineDeadError("no")


def test_an_end_counts_once(tmp_path: Path) -> None:
    recording = begun(tmp_path)
    meter = Followers([NoMeter(), recording.recorder(Request("a", (1,), 4, arrival_time=time.monotonic()))])
    meter.on_tokens(2, time.monotonic())
    meter.on_finished(FinishReason.STOP, time.monotonic())
    meter.on_finished(FinishReason.ABORT, time.monotonic())
    recording.close()
    recording.close()
    (line,) = arrivals(tmp_path)
    assert (line["output_length"], line["finish_reason"], line["queue_ms"]) == (2, "stop", None)
