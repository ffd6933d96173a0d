"""From the ids that clients see to the engine's: which requests belong to a call. Filled by `generation/answer.py`.

Read by `routes/admin.py`, so that an operator can ask about a request by its `X-Request-Id` or by the id in its answer.
"""

from collections import OrderedDict
from collections.abc import Sequence

CAPACITY = 10_000


class CallDirectory:
    """Bounded: the oldest calls are forgotten first. Belongs to the event loop."""

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        self._engine_ids: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def note(self, names: Sequence[str], engine_ids: Sequence[str]) -> None:
        """Remember a call under each of its names. A name that was used before now means the newer call."""
        for name in names:
            self._engine_ids[name] = tuple(engine_ids)
            self._engine_ids.move_to_end(name)
        while len(self._engine_ids) > self._capacity:
            self._engine_ids.popitem(last=False)

    def find(self, name: str) -> tuple[str, ...]:
        """The engine's ids of a call, in the order of its choices; empty if it is not known."""
        return self._engine_ids.get(name, ())
