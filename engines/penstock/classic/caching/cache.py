"""Response caches: the interface, what is kept, and the cache in this process's memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol

from penstock.classic.messages import InferResponse, Parameter
from penstock.classic.tensors import Array, Tensor


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """One response. Its arrays are read-only: several requests get the same ones."""

    outputs: tuple[Tensor, ...]
    parameters: dict[str, Parameter]

    @classmethod
    def of(cls, response: InferResponse) -> CachedResponse:
        """A copy: outputs of a batch are views, which would keep the whole batch in memory."""
        outputs = tuple(
            Tensor(tensor.name, tensor.datatype, _read_only(tensor.array)) for tensor in response.outputs or ()
        )
        return cls(outputs, dict(response.parameters))

    def response(self) -> InferResponse:
        outputs = [Tensor(tensor.name, tensor.datatype, tensor.array) for tensor in self.outputs]
        return InferResponse(outputs, dict(self.parameters))

    @property
    def byte_size(self) -> int:
        """What it takes in memory, about."""
        return _OVERHEAD + sum(tensor_bytes(tensor) for tensor in self.outputs)


@dataclass(slots=True)
class CacheCounters:
    """Of all models together. Times are nanoseconds."""

    capacity: int
    """Bytes."""
    used: int = 0
    """Bytes."""
    entries: int = 0
    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0


class ResponseCache(Protocol):
    """Lives on the event loop. A cache that cannot be reached misses: it never fails a request."""

    shared: bool
    """Whether other servers read it too, and this one after a restart: keys must then name a model by its content."""

    @property
    def counters(self) -> CacheCounters | None:
        """None: another process keeps the entries, and counts."""
        ...

    async def start(self) -> None:
        """Raises EngineError where it can never be used. One that cannot be reached may come later."""
        ...

    async def lookup(self, key: bytes) -> CachedResponse | None: ...

    async def insert(self, key: bytes, response: CachedResponse) -> None: ...

    async def close(self) -> None: ...


_OVERHEAD = 512
"""Bytes of an entry without its data."""
_TENSOR_OVERHEAD = 256
_ITEM_OVERHEAD = 40
"""Bytes of an element of a BYTES tensor beside its text: a Python object and the pointer to it."""


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def tensor_bytes(tensor: Tensor) -> int:
    """What it takes in memory, about."""
    if tensor.datatype == "BYTES":
        return _TENSOR_OVERHEAD + sum(len(item) + _ITEM_OVERHEAD for item in tensor.array.flat)
    return _TENSOR_OVERHEAD + tensor.array.nbytes


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
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            counters.hits += 1
        counters.lookup_ns += monotonic_ns() - started
        return entry[0] if entry is not None else None

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
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.counters.used -= entry[1]
            self.counters.entries -= 1
