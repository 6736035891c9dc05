"""The local response cache: what is in it, what goes first, and how many bytes it counts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.classic.caching.cache import CachedResponse, LocalCache
from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor

CAPACITY = 4096
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


def response(size: int) -> CachedResponse:
    return CachedResponse.of(InferResponse([Tensor("OUT", "UINT8", np.zeros(size, np.uint8))], {"size": size}))


class LocalCacheMachine(RuleBasedStateMachine):
    """Beside an ordered dictionary of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = LocalCache(CAPACITY)
        self.expected: OrderedDict[bytes, int] = OrderedDict()

    @rule(key=KEYS, size=st.integers(0, CAPACITY))
    def insert(self, key: bytes, size: int) -> None:
        entry = response(size)
        asyncio.run(self.cache.insert(key, entry))
        self.expected.pop(key, None)
        if entry.byte_size <= CAPACITY:
            while sum(self.expected.values()) + entry.byte_size > CAPACITY:
                self.expected.popitem(last=False)
            self.expected[key] = entry.byte_size

    @rule(key=KEYS)
    def lookup(self, key: bytes) -> None:
        found = asyncio.run(self.cache.lookup(key))
        if key in self.expected:
            self.expected.move_to_end(key)
            assert found is not None
            assert found.byte_size == self.expected[key]
        else:
            assert found is None

    @invariant()
    def counts(self) -> None:
        counters = self.cache.counters
        assert counters.entries == len(self.expected)
        assert counters.used == sum(self.expected.values()) <= CAPACITY


TestLocalCache = LocalCacheMachine.TestCase


def test_text_counts_with_its_objects() -> None:
    texts = np.array([b"x" * 1000, b""], np.object_)
    entry = CachedResponse.of(InferResponse([Tensor("OUT", "BYTES", texts)]))
    assert entry.byte_size >= 1000 + 2 * 40
