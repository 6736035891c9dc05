"""A response cache in this process's memory: the least recently used entries go first."""

from __future__ import annotations

from collections import OrderedDict
from time import monotonic_ns

from penstock.classic.caching.cache import CacheCounters, CachedResponse


class LocalCache:
    """At most `capacity` bytes, of all models together. A response that alone takes more is not kept."""

    shared = False

    def __init__(self, capacity: int) -> None:
        self._counters = CacheCounters(capacity)
        self._entries: OrderedDict[bytes, tuple[CachedResponse, int]] = OrderedDict()

    @property
    def counters(self) -> CacheCounters:
        return self._counters

    async def start(self) -> None:
        """There is nothing to wait for."""

    async def lookup(self, key: bytes) -> CachedResponse | None:
        started = monotonic_ns()
        counters = self.counters
        counters.lookups += 1
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            counters.hits += 1
        counters.lookup_ns += monotonic_ns() - started
        return found[0] if found is not None else None

    async def insert(self, key: bytes, response: CachedResponse) -> None:
        """Replaces what is there under this key."""
        started = monotonic_ns()
        size = response.byte_size
        self._remove(key)
        if size <= self.counters.capacity:
            while self.counters.used + size > self.counters.capacity:
                self._remove(next(iter(self._entries)))
                self.counters.evictions += 1
            self._entries[key] = response, size
            self.counters.used += size
            self.counters.entries += 1
        self.counters.insertion_ns += monotonic_ns() - started

    async def close(self) -> None:
        self._entries.clear()

    def _remove(self, key: bytes) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self.counters.used -= found[1]
            self.counters.entries -= 1
