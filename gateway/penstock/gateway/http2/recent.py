"""What was made of the last requests' heads."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MAX_BYTES = 8 << 10
"""Of heads, as they count against the limit of a header list; in memory they take some times as much. A client has a
few kinds of requests, of less than a kilobyte each. It must not be able to make every connection hold much."""


class Recent(Generic[K, V]):
    """The latest values; the oldest ones go when all together are too large."""

    def __init__(self) -> None:
        self._kept: dict[K, tuple[V, int]] = {}
        self._bytes = 0

    def get(self, key: K) -> V | None:
        found = self._kept.get(key)
        return None if found is None else found[0]

    def keep(self, key: K, value: V, size: int) -> None:
        """The key is new. What is too large alone is not kept."""
        if size > _MAX_BYTES:
            return
        self._bytes += size
        while self._bytes > _MAX_BYTES:
            oldest = next(iter(self._kept))
            self._bytes -= self._kept.pop(oldest)[1]
        self._kept[key] = value, size

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0
