"""docs/policies.md is true: its files are written, its Python and its commands are run, and its policy serves HTTP."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scheduler.policies import BUNDLED
from tests.api.whole_server import WholeServer
from tests.model.checkpoints import tiny_checkpoint

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(file name or nothing, text) of every block in a language."""
    for found, name, text in BLOCK.findall(TEXT):
        if found == language:
            yield name, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works: the tutorial's files, and its package installed where only this folder sees it."""
    folder = tmp_path_factory.mktemp("tutorial")
    for language in ("python", "toml"):
        for name, text in blocks(language):
            if name:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "site", "./twinmesh-vip"]
    subprocess.run(install, cwd=folder, check=True, timeout=300)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])}


def run(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300, check=False
    )


def test_the_table_names_every_bundled_policy() -> None:
    assert [name for name in re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) if name in BUNDLED] == list(BUNDLED)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_python_blocks_run_one_after_the_other(folder: Path) -> None:
    script = "\n".join(text for name, text in blocks("python") if not name)
    done = run([sys.executable, "-c", script], folder)
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_compares_the_readers_policy(folder: Path) -> None:
    (command,) = [text for _, text in blocks("sh") if "scheduler compare" in text]
    lines = [line for line in command.splitlines() if not line.startswith("pip ")]
    shell = "\n".join(lines).replace("python ", f"{sys.executable} ", 1)
    done = run(["sh", "-ec", shell], folder)
    assert done.returncode == 0, done.stderr
    assert "vip(paying=gold)" in done.stdout
    assert (folder / "vip.html").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_ends_with_the_readers_own_policy_served_over_http(folder: Path) -> None:
    serve, watch = [text for _, text in blocks("sh") if "api.serve" in text]
    settings = [first or second for first, second in re.findall(r'--set (?:"([^"]+)"|(\S+))', serve + watch)]
    assert len(settings) == 4
    model = tiny_checkpoint("llama_untied", folder)
    small = ("dtype=float32", "max_model_len=128", "served_model_name=smollm2-135m-instruct")
    with WholeServer(folder, *settings, *small, model=str(model), environment=environment(folder)) as server:
        body = {"model": "smollm2-135m-instruct", "prompt": [5, 6, 7], "max_tokens": 8, "user": "gold"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}, timeout=60)
        assert answer.status_code == 200, answer.text
        told = httpx.get(f"{server.url}/admin/scheduler/requests/mine").json()
        assert told["policy"] == "vip"
        assert told["choices"][0]["status"] == "finished"
        assert httpx.get(f"{server.url}/server_info").json()["shadow"] == {"policy": "vip", "is_on": True}
        counted = re.compile(r"^twinmesh_shadow_time_to_first_token_seconds_count\{.*\} 1\.0$", re.MULTILINE)
        deadline = time.monotonic() + 10
        while not counted.search(httpx.get(f"{server.url}/metrics").text):
            assert time.monotonic() < deadline, "the shadow has predicted nothing"
            time.sleep(0.1)
