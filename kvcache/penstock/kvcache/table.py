"""Block tables of a request, one for each group of layers: what a group keeps of the past, and where it is."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.kvcache.hashing import HashChain, group_key
from penstock.kvcache.pool import BlockHash

_WINDOWS_UNDER_WAY = 2
"""Limit for one prompt's tokens in all steps under way, as a multiple of the window: their blocks go back only when the
steps are collected, so more of them would cost the memory that a window saves."""
_LEAST_CHUNK = 512
"""Enough tokens to keep a GPU's arithmetic busy: fewer in a step would cost a prompt that runs alone its speed."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the keys and values of the same tokens in blocks of the same size.

    All groups take their blocks from one pool: a block belongs to one group of one request at a time, so the runner may
    lay the layers of different groups over the same memory.
    """

    block_size: int
    """Tokens."""
    window: int = 0
    """How many tokens a token attends to, itself included; 0: all before it."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.window < 0:
            raise ValueError(f"no such group of layers: {self}")

    def first_block(self, num_computed: int) -> int:
        """The first block that the token at position `num_computed`, or any later one, still reads."""
        if not self.window:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size


def largest_chunk(groups: Sequence[KVGroup], max_tokens: int, steps_in_flight: int) -> int:
    """Most tokens of one request in a step of at most `max_tokens`."""
    window = max(group.window for group in groups)
    if not window:
        return max_tokens
    return min(max_tokens, max(_LEAST_CHUNK, _WINDOWS_UNDER_WAY * window // steps_in_flight))


def blocks_of_request(groups: Sequence[KVGroup], num_tokens: int, chunk: int) -> int:
    """Most blocks that a request of `num_tokens` needs at once when it is computed `chunk` tokens at a time."""
    total = 0
    for group in groups:
        blocks = -(-num_tokens // group.block_size)
        if group.window:
            # a window and a chunk, at the worst place between block borders
            blocks = min(blocks, -(-(group.window - 1 + chunk) // group.block_size) + 1)
        total += blocks
    return total


@lru_cache(maxsize=64)
def longest_request(groups: tuple[KVGroup, ...], num_blocks: int, chunk: int, limit: int) -> int:
    """Most tokens, up to `limit`, of a request that runs in a pool of `num_blocks` when it is alone."""
    return bisect_right(range(1, limit + 1), num_blocks, key=lambda length: blocks_of_request(groups, length, chunk))


NO_BLOCK = -1
"""An entry of a block table that lies behind its group's window."""


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


class StateTable:
    """A request's rows of recurrent states: tokens of blocks that follow each other write the same row, up to a
    checkpoint, and the next ones another. Such a run of blocks has one row, and this is a list of runs."""

    __slots__ = (
        "chain",
        "ends",
        "first",
        "index",
        "length",
        "num_computed",
        "num_published",
        "prompt",
        "prompt_end",
        "rows",
        "start",
    )

    def __init__(self, index: int, chain: HashChain, prompt: int) -> None:
        """`prompt`: blocks that the request's tokens need when it is admitted. All that is counted here is in blocks,
        and `chain` has their hashes."""
        self.index = index
        """Of the table among those of a request."""
        self.chain = chain
        self.prompt = prompt
        self.prompt_end = 0
        """Behind which block the checkpoint near the prompt's end is; 0: there is none."""
        self.start = 0
        """Where the request began to compute: behind a checkpoint that it found, or 0."""
        self.rows: list[int] = []
        """Of the runs, the first one is the last checkpoint's or that in use."""
        self.ends: list[int] = []
        """Of the runs: a checkpoint is, or is going to be, behind the last block of each."""
        self.first = 0
        """Where the first run begins, as far as its row is read."""
        self.length = 0
        """Blocks that can be written. The last run may be planned to end behind these."""
        self.num_computed = 0
        """By steps that succeeded, as of the last call of `publish`."""
        self.num_published = 0
        """Checkpoints up to here were offered to the prefix cache, or found in it."""

    @property
    def block_ids(self) -> list[int]:
        """The row of each block."""
        ids = [NO_BLOCK] * self.first
        for row, end in zip(self.rows, self.ends, strict=True):
            ids += [row] * (min(end, self.length) - len(ids))
        return ids


class BlockTables:
    """All that a request holds. Only `KVCacheManager` changes it."""

    __slots__ = ("capacity", "copies", "loads", "next_publish", "next_trim", "states", "step_end", "tables")

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
        self.states: StateTable | None = None
        """Rows of recurrent states (`HybridCacheManager`)."""
        self.step_end = 0
        """A step that would compute positions on both sides of this one had better end before it: what is there then
        is kept. 0: there is no such position."""

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """Copies, one for each group, and the rows of states behind them."""
        of_blocks = tuple([list(table.block_ids) for table in self.tables])
        return of_blocks if self.states is None else (*of_blocks, self.states.block_ids)


class Growth(NamedTuple):
    """How tables changed in `KVCacheManager.grow`."""

    updates: list[tuple[int, int, list[int]]]
    """(group, entry, block ids): from the entry on the group's table holds these."""
    copies: list[tuple[int, int]]
    """New ones among `BlockTables.copies`."""
