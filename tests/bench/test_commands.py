"""The two commands from end to end, against stubs in a thread of their own."""

import asyncio
import contextlib
import json
import threading

import pytest

from bench import machine, priority, serve
from bench.roofline import MachineLimits
from tests.bench.stub_server import StubServer
from tests.bench.test_numbers import SMOLLM2

INFO = {"architecture": SMOLLM2, "weights": {"dtype": "bfloat16"}}


@contextlib.contextmanager
def served(*stubs):
    """Run the stubs on an event loop in another thread: the commands start a loop of their own."""
    is_up, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for stub in stubs:
                await stack.enter_async_context(stub.running())
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert is_up.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@pytest.fixture
def known_machine(monkeypatch):
    limits = MachineLimits("cpu", "bfloat16", 40e9, 800e9)
    monkeypatch.setattr(serve, "measure_in_process_of_its_own", lambda dtype: limits)


@pytest.mark.usefixtures("known_machine")
def test_side_by_side(tmp_path, capsys):
    ours, theirs = StubServer(server_info=INFO), StubServer(token_secs=0.003)
    out = tmp_path / "out.json"
    with served(ours, theirs):
        targets = ["--target", f"ours={ours.url}", "--target", f"theirs={theirs.url},m,q4_1"]
        load = ["--concurrency", "1,2", "--rounds", "2", "--requests", "4", "--prompt-len", "6", "--max-tokens", "5"]
        assert serve.main([*targets, *load, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["models"] == {"ours": "stub", "theirs": "m"}
    assert [level["concurrency"] for level in document["levels"]] == [1, 2]
    for level in document["levels"]:
        assert {name: len(rounds) for name, rounds in level["servers"].items()} == {"ours": 2, "theirs": 2}
        assert all(r["mean_prompt_tokens"] == 6 for rounds in level["servers"].values() for r in rounds)
        assert all(r["roofline_share"] > 0 for rounds in level["servers"].values() for r in rounds)
        assert level["ratios"][0]["output_tok_s"]["min"] > 1
    shown = capsys.readouterr().out
    assert "ours ÷ theirs" in shown
    assert "2 clients" in shown


def test_open_loop_command(capsys):
    stub = StubServer()
    with served(stub):
        arguments = ["--rate", "50", "--duration", "0.4", "--max-tokens", "2", "--warmup", "0", "--no-roofline"]
        assert serve.main(["--url", stub.url, *arguments]) == 0
    assert "50 requests/s" in capsys.readouterr().out


def test_a_server_that_fails_everything_is_exit_code_1(capsys):
    stub = StubServer(fault="status")
    with served(stub):
        assert serve.main(["--url", stub.url, "--requests", "2", "--warmup", "0", "--no-roofline"]) == 1
    assert "broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no answer"),
        (["--target", "x"], "not name=url"),
        (["--target", "x=http://h,m,int3"], "int3"),
        (["--target", "x=http://h", "--target", "x=http://h"], "same name"),
        (["--url", "ftp://h"], "not an http"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys):
    assert serve.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_server_without_models_needs_a_name(capsys):
    stub = StubServer(lists_models=False)
    with served(stub):
        assert serve.main(["--url", stub.url, "--no-roofline"]) == 1
    assert "name one" in capsys.readouterr().err


PROBE = ["--concurrency", "24", "--duration", "0.8", "--max-tokens", "2", "--prompt-len", "3", "--alone", "3"]


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(priority, "PAUSE_BETWEEN_RUNS_SECS", 0.0)


@pytest.mark.usefixtures("no_pauses")
def test_priority_probe_where_priority_holds(tmp_path, capsys):
    stub = StubServer(serves_one_at_a_time=True, token_secs=0.001)
    out = tmp_path / "out.json"
    with served(stub):
        priority.main(["--url", stub.url, *PROBE, "--json", str(out)])
    document = json.loads(out.read_text())
    passed = {criterion["name"]: criterion["passed"] for criterion in document["criteria"]}
    assert document["low_over_high_ttft_p50"] > 3
    assert passed["failed requests"]
    assert passed["priority 5: status"]
    assert passed["priority 1.0: status"]
    assert passed["priority absent: status"]
    assert document["passed"] == all(passed.values())
    assert {body.get("priority") for body in stub.bodies} == {None, 0.0, 0.5, 1.0, 5}
    assert "criteria" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pauses")
def test_priority_probe_fails_where_it_does_not(capsys):
    stub = StubServer(token_secs=0.001)
    with served(stub):
        assert priority.main(["--url", stub.url, *PROBE, "--duration", "0.3"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_machine_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "MATMUL_SIZE", 64)
    assert machine.main(["--dtype", "float32"]) == 0
    limits = MachineLimits(**json.loads(capsys.readouterr().out))
    assert limits.read_bytes_per_sec > 1e6
    assert limits.matmul_flops_per_sec > 1e6
