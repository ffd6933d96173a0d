"""The version of this package and of those under it, read by the launcher, `/version` and recordings."""

import platform
from functools import cache
from importlib import metadata

REPORTED_PACKAGES = ("jax", "jaxlib", "flax", "quart", "uvicorn", "tokenizers", "pydantic")


def _installed_version() -> str:
    try:
        return metadata.version("twinmesh")
    except metadata.PackageNotFoundError:
        return "0.0.0+source"


VERSION = _installed_version()


@cache
def package_versions() -> dict[str, str]:
    """Versions of this package, of Python and of the libraries that matter, as far as they are installed."""
    versions = {"twinmesh": VERSION, "python": platform.python_version()}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
