"""Block tables and what the manager answers when one grows."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.kvcache.pool import BlockHash


@dataclass(slots=True, eq=False)
class BlockTable:
    """One request's blocks: position p lives in block_ids[p // block_size], slot p % block_size."""

    root: BlockHash
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the leading full blocks, as far as they have been computed or found in the prefix cache."""
    capacity: int = 0
    """Positions below this can be written without asking the manager. Only `KVCacheManager` changes it."""
    next_publish: int = sys.maxsize
    """`KVCacheManager.publish` has something to do once this many tokens are computed; never without a prefix cache."""


class Growth(NamedTuple):
    """How a table changed in `KVCacheManager.grow`: from entry `start` on it holds `block_ids`."""

    start: int
    block_ids: list[int]
    copy: tuple[int, int] | None
    """(source, destination): contents to copy before the next write, since the source is shared or cached."""
