"""A request's block tables, one for each group of layers, and what the manager answers when they grow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.kvcache.groups import KVGroup
from penstock.kvcache.hashing import BlockHasher, group_key
from penstock.kvcache.pool import BlockHash

NO_BLOCK = -1
"""An entry of a block table that lies behind its group's window."""


class HashChain:
    """Hashes of the leading full blocks of one sequence of tokens, as far as they were needed so far."""

    __slots__ = ("_hasher", "adapter", "block_size", "hashes", "root")

    def __init__(
        self,
        hasher: BlockHasher,
        root: BlockHash,
        block_size: int,
        hashes: list[BlockHash] | None = None,
        adapter: str = "",
    ) -> None:
        """`adapter`: the one that `root` was made with."""
        self._hasher = hasher
        self.root = root
        self.adapter = adapter
        self.block_size = block_size
        self.hashes = [] if hashes is None else hashes

    def extend(self, token_ids: Sequence[int], count: int) -> None:
        """Makes the first `count` hashes known."""
        hashes, size = self.hashes, self.block_size
        for index in range(len(hashes), count):
            tokens = token_ids[index * size : (index + 1) * size]
            hashes.append(self._hasher.block(hashes[-1] if hashes else self.root, tokens))

    def branch(self, num_tokens: int) -> HashChain:
        """A chain of another sequence that has the same first `num_tokens`."""
        hashes = self.hashes[: num_tokens // self.block_size]
        return HashChain(self._hasher, self.root, self.block_size, hashes, self.adapter)


Chains = tuple[HashChain, ...]
"""One for each group of layers; groups with equal block sizes share theirs."""


class BlockTable:
    """One group's blocks: position p lives in block_ids[p // block_size], slot p % block_size."""

    __slots__ = ("block_ids", "chain", "first", "group", "index", "num_published")

    def __init__(self, group: KVGroup, index: int, chain: HashChain) -> None:
        self.group = group
        self.index = index
        """Of the group."""
        self.chain = chain
        self.block_ids: list[int] = []
        self.first = 0
        """Entries below lie behind the window: NO_BLOCK, given back or never had."""
        self.num_published = 0
        """Leading blocks that were offered to the prefix cache, or found in it."""

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.first :]

    def keys(self, start: int, stop: int) -> list[BlockHash]:
        """What the prefix cache knows the blocks `start` to `stop` - 1 by, whose hashes are known."""
        return [group_key(block_hash, self.index) for block_hash in self.chain.hashes[start:stop]]


class BlockTables:
    """All that a request holds. Only `KVCacheManager` changes it."""

    __slots__ = ("capacity", "copies", "loads", "next_publish", "next_trim", "tables")

    def __init__(self, tables: list[BlockTable]) -> None:
        self.tables = tables
        self.capacity = 0
        """Positions below this can be written without asking the manager."""
        self.copies: list[tuple[int, int]] = []
        """(source, destination): contents to copy before the next write. The sources are held as well, until
        `KVCacheManager.copied` says that a step has done it: one that failed can be run again."""
        self.loads: list[tuple[int, Any]] = []
        """(block, contents from the tier): to be put there before the next step computes. They stay until
        `KVCacheManager.loaded`, as copies do."""
        self.next_publish = sys.maxsize
        """`KVCacheManager.publish` has something to do once this many tokens are computed; never without a prefix
        cache."""
        self.next_trim = sys.maxsize
        """`KVCacheManager.trim` has something to do once this many tokens are computed; never without a window."""

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """Copies, one for each group."""
        return tuple([list(table.block_ids) for table in self.tables])


class Growth(NamedTuple):
    """How tables changed in `KVCacheManager.grow`."""

    updates: list[tuple[int, int, list[int]]]
    """(group, entry, block ids): from the entry on the group's table holds these."""
    copies: list[tuple[int, int]]
    """New ones among `BlockTables.copies`."""
