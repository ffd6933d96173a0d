"""The version of this package, read by the launcher and `/version`."""

from importlib import metadata


def _installed_version() -> str:
    try:
        return metadata.version("twinmesh")
    except metadata.PackageNotFoundError:
        return "0.0.0+source"


VERSION = _installed_version()
