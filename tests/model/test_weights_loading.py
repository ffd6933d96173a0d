"""From a name to weights on devices: conversion once, the cache, damage, sharding, and what cannot be found."""

import logging
import shutil
import threading
from dataclasses import dataclass, field

import huggingface_hub
import huggingface_hub.errors
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from model.errors import DamagedCheckpointError, ModelNotFoundError, OfflineError, UnsupportedModelError
from model.mesh import make_mesh
from model.weights import LoadedModel, resolve_and_load
from model.weights.convert import convert
from model.weights.safetensors import open_safetensors

from .checkpoints import tiny_checkpoint, write_gguf


@dataclass
class Recorder:
    """A `Progress` that remembers."""

    names: list[str] = field(default_factory=list)
    amounts: float = 0
    total: float | None = None
    running: int = 0

    def start(self, name, total):
        self.names.append(name)
        self.total = total or self.total
        self.running += 1

    def advance(self, amount):
        self.amounts += amount

    def finish(self):
        self.running -= 1


@dataclass
class Place:
    """A checkpoint, and a cache folder."""

    source: object
    cache: object

    def load(self, **changes) -> tuple[LoadedModel, Recorder]:
        progress = Recorder()
        options = {"dtype": "float32", "cache_dir": self.cache, "progress": progress} | changes
        model = resolve_and_load(str(options.pop("source", self.source)), **options)
        assert progress.running == 0
        return model, progress

    def converted(self):
        (folder,) = (self.cache / "checkpoints").iterdir()
        return folder


@pytest.fixture
def place(tmp_path):
    return Place(tiny_checkpoint("llama_untied", tmp_path), tmp_path / "cache")


def test_conversion_is_done_once_and_loads_the_same_weights(place):
    first, progress = place.load()
    assert progress.names == ["converting weights", "loading weights"]
    assert progress.amounts == progress.total == len(first.params)
    second, progress = place.load()
    assert progress.names == ["loading weights"]
    assert second.digest == first.digest
    assert first.name == "llama_untied"
    for path, array in convert(open_safetensors(place.source), "float32"):
        np.testing.assert_array_equal(np.asarray(first.params[path]), array)
        np.testing.assert_array_equal(np.asarray(second.params[path]), array)
    assert second.config == first.config
    assert second.tokenizer.encode("ab", parse_special=False) == first.tokenizer.encode("ab", parse_special=False)


def test_bfloat16_keeps_norms_in_float32(place):
    model, _ = place.load(dtype="bfloat16")
    dtypes = {path: array.dtype.name for path, array in model.params.items()}
    assert all((name == "float32") == path.endswith("/scale") for path, name in dtypes.items())
    assert model.digest != place.load()[0].digest


def test_the_digest_is_of_the_weights_not_of_the_files(place, tmp_path):
    first, _ = place.load()
    copy = tmp_path / "elsewhere"
    shutil.copytree(place.source, copy, copy_function=shutil.copy)
    second, progress = place.load(source=copy)
    assert "converting weights" in progress.names
    assert second.digest == first.digest
    file = write_gguf(place.source, tmp_path / "model.gguf")
    third, _ = place.load(source=file)
    assert third.name == "model"
    assert third.digest == first.digest


def test_a_changed_source_is_converted_again(place):
    place.load()
    config = place.source / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    model, progress = place.load()
    assert progress.names[0] == "converting weights"
    assert model.config.rms_norm_eps == 1e-5


def _truncate(folder):
    largest = max((path for path in (folder / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)


def _remove_a_file(folder):
    next(path for path in sorted((folder / "params").rglob("*")) if path.is_file()).unlink()


def _break_the_metadata(folder):
    path = folder / "twinmesh.json"
    path.write_text(path.read_text()[:-100])


def _leave_the_metadata_out(folder):
    (folder / "twinmesh.json").unlink()


def _zero_the_manifest(folder):
    path = folder / "params" / "manifest.ocdbt"
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = [_truncate, _remove_a_file, _break_the_metadata, _leave_the_metadata_out, _zero_the_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cached_checkpoint_is_made_again(damage, place, caplog):
    first, _ = place.load()
    damage(place.converted())
    with caplog.at_level(logging.WARNING):
        second, progress = place.load()
    assert "converting weights" in progress.names
    assert second.digest == first.digest
    np.testing.assert_array_equal(second.params["embed/embedding"], first.params["embed/embedding"])
    _, progress = place.load()
    assert progress.names == ["loading weights"]


def test_a_checkpoint_that_orbax_cannot_read_is_made_again(place, monkeypatch):
    first, _ = place.load()
    restore = ocp.Checkpointer.restore
    failures = iter([ValueError("DATA_LOSS")])

    def fails_once(self, *args, **options):
        for failure in failures:
            raise failure
        return restore(self, *args, **options)

    monkeypatch.setattr(ocp.Checkpointer, "restore", fails_once)
    second, progress = place.load()
    assert progress.names == ["loading weights", "converting weights", "loading weights"]
    assert second.digest == first.digest


def test_what_a_killed_conversion_left_does_not_matter(place, monkeypatch):
    place.load()
    folder = place.converted()
    leftover = folder.parent / f".{folder.name}-0123"
    folder.rename(leftover)
    monkeypatch.setattr("model.weights.orbax.STALE_SECS", -1.0)
    _, progress = place.load()
    assert "converting weights" in progress.names
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_two_servers_at_once(place):
    results = []

    def load():
        results.append(place.load()[0])

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({model.digest for model in results}) == 1
    assert len(results) == 2
    assert [entry.name for entry in (place.cache / "checkpoints").iterdir()] == [place.converted().name]


def test_a_checkpoint_folder_is_a_model(place, tmp_path):
    first, _ = place.load()
    folder = tmp_path / "mine"
    shutil.copytree(place.converted(), folder)
    model, progress = place.load(source=folder)
    assert progress.names == ["loading weights"]
    assert (model.name, model.digest) == ("mine", first.digest)
    with pytest.raises(UnsupportedModelError, match="holds float32"):
        place.load(source=folder, dtype="bfloat16")
    _truncate(folder)
    with pytest.raises(DamagedCheckpointError, match="is missing or not as"):
        place.load(source=folder)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (2, 2), (3, 1)])
def test_each_device_holds_its_shard(tp, dp, place):
    whole, _ = place.load()
    model, _ = place.load(mesh=make_mesh(tp, dp))
    for path, array in model.params.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(whole.params[path]))
    kernel = model.params["layers/0/attention/qkv/kernel"]
    heads = 4 if tp == 3 else 4 // tp
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, heads, 4, 4)}
    assert len(kernel.addressable_shards) == tp * dp


def test_default_device_without_a_mesh(place):
    model, _ = place.load()
    assert {array.sharding.device_set.pop() for array in model.params.values()} == {jax.devices()[0]}


@pytest.mark.parametrize("source", ["smollm3", "/no/such/folder", "./gone.gguf", "a/b/c"])
def test_an_unknown_name_is_refused_with_the_choices(source, place):
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m-instruct.*\.gguf"):
        place.load(source=source)


def test_a_folder_without_a_model_is_refused(place, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError):
        place.load(source=tmp_path / "empty")


def test_a_hub_id_is_fetched_without_what_is_not_needed(place, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(name=name, **options)
        return str(place.source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model, _ = place.load(source="someone/some-model")
    assert model.name == "someone/some-model"
    assert asked["name"] == "someone/some-model"
    assert "*.bin" not in asked["allow_patterns"]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("offline"), OfflineError),
        (ConnectionError("no network"), OfflineError),
    ],
)
def test_a_hub_id_that_cannot_be_fetched(failure, error, place, monkeypatch):
    def snapshot_download(name, **options):
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(error, match="could not be downloaded"):
        place.load(source="someone/some-model")


def test_a_tokenizer_with_more_tokens_than_the_table_is_refused(place):
    tokenizer = place.source / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"!": 5', '"!": 500'))
    with pytest.raises(UnsupportedModelError, match="501 tokens"):
        place.load()
