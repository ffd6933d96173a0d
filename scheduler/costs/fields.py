"""Reads JSON objects by hand: each key has one type, nothing is missing, nothing is unknown. Used by `stored.py`."""

from collections.abc import Iterator, Mapping

from scheduler.errors import ConfigError


class Fields:
    """The keys of one JSON object, taken one after the other. `where` begins every message.

    Every method raises ConfigError for a value that is missing or of another type. Mutates only itself.
    """

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: not a JSON object")
        self._where = where
        self._left: dict[object, object] = dict(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self._take(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integer(self, key: str) -> int:
        """An integer; true and false are none."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str) -> float:
        """An integer or a float, as a float."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._take(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def inner(self, key: str) -> "Fields":
        """An object."""
        return Fields(f"{self._where}: {key}", self._take(key))

    def objects(self, key: str) -> Iterator["Fields"]:
        """A list of objects."""
        value = self._take(key)
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        for i, item in enumerate(value):
            yield Fields(f"{self._where}: {key}[{i}]", item)

    def finish(self) -> None:
        """Raises ConfigError if a key was not taken."""
        if self._left:
            raise ConfigError(f"{self._where}: unknown keys: {', '.join(sorted(map(str, self._left)))}")

    def _take(self, key: str) -> object:
        if key not in self._left:
            raise ConfigError(f"{self._where}: {key} is missing")
        return self._left.pop(key)

    def _wrong(self, key: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key} is {value!r}; it must be {wanted}")
