"""Groups of layers: which of them share a block table, and what they still need of a request's past."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
