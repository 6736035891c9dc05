"""The computation of the simulated engine: a digest for each position, kept in the slots of a paged cache.

The digest of a position is made of the adapter, the token, the position, and what each group of layers lets it see of
earlier positions, read back through the group's block table. With full attention that is the position before it and one
more at a place that depends on the position alone; with a window, all positions in it. So digests depend on the whole
history as attention does, and a wrong block table, a copy that was missed, a stale prefix hit, a slot that
another request wrote, a block that was given back too early: each of them changes digests. A recurrent state is the
newest digest, in a row that the next position writes over: so it is wrong wherever a position is computed again without
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from penstock.kvcache import KVGroup, StateGroup

_MASK = (1 << 64) - 1
_FACTOR = 0xBF58476D1CE4E5B9
_GOLDEN = 0x9E3779B97F4A7C15
_SPOILT = 0xBAD
_SLOT_BYTES = 8


def mix(value: int, number: int) -> int:
    """One round of a multiplicative hash, 64 bits: enough to make every bit of `value` matter."""
    value = (value * _FACTOR + number) & _MASK
    return value ^ value >> 29


def _far(position: int) -> int:
    """An earlier position, anywhere."""
    return (position * 0x9E3779B1 % 2**32 >> 8) % position


def origin_of(adapter: str) -> int:
    """What an adapter's weights would do to the tokens, its key does."""
    return _GOLDEN ^ crc32(adapter.encode("utf-8", "surrogatepass"))


class PagedDigests:
    """Slots for `num_blocks` blocks, each of which any group may use."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        # groups hold the keys and values of different layers: one's slots are of no use to another
        self._groups = [(g.block_size, g.window, number * _GOLDEN & _MASK) for number, g in enumerate(groups)]
        self._stride = max(group.block_size for group in groups)
        self._slots = [0] * (num_blocks * self._stride)
        if len(groups) == 1 and not groups[0].window:
            self.compute = self._compute_plain  # type: ignore[method-assign]

    def copy(self, source: int, destination: int) -> None:
        """Copies a whole block."""
        slots, size = self._slots, self._stride
        slots[destination * size : (destination + 1) * size] = slots[source * size : (source + 1) * size]

    @property
    def block_bytes(self) -> int:
        return self._stride * _SLOT_BYTES

    def read(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """[blocks, block_bytes]"""
        size = self._stride
        rows = [self._slots[block_id * size : (block_id + 1) * size] for block_id in block_ids]
        return np.array(rows, np.uint64).view(np.uint8).reshape(len(block_ids), self.block_bytes)

    def write(self, block_id: int, contents: npt.NDArray[np.uint8]) -> None:
        """`contents`: [block_bytes]"""
        size = self._stride
        self._slots[block_id * size : (block_id + 1) * size] = contents.view(np.uint64).tolist()

    def compute(self, tables: Sequence[Sequence[int]], token_id: int, position: int, origin: int) -> int:
        """The digest of a position, which is in its slots then. `tables`: one for each group."""
        digest = mix((origin ^ token_id) + self._seen(tables, position), position)
        self._keep(tables, position, digest)
        return digest

    def _seen(self, tables: Sequence[Sequence[int]], position: int) -> int:
        slots, stride, seen = self._slots, self._stride, 0
        for table, (size, window, _) in zip(tables, self._groups, strict=True):
            if window:
                seen += self._window(table, size, max(0, position - window + 1), position)
            elif position:
                for place in (position - 1, _far(position)):
                    seen += slots[table[place // size] * stride + place % size]
        return seen

    def _keep(self, tables: Sequence[Sequence[int]], position: int, digest: int) -> None:
        for table, (size, _, salt) in zip(tables, self._groups, strict=True):
            self._slots[table[position // size] * self._stride + position % size] = digest ^ salt

    def _compute_plain(self, tables: Sequence[Sequence[int]], token_id: int, position: int, origin: int) -> int:
        """`compute` for one group without a window, in one piece: this is called for each token of a load test."""
        slots, size, (table,) = self._slots, self._stride, tables
        seen = origin ^ token_id
        if position:
            near, far = position - 1, (position * 0x9E3779B1 % 2**32 >> 8) % position
            seen += slots[table[near // size] * size + near % size] + slots[table[far // size] * size + far % size]
        digest = (seen * _FACTOR + position) & _MASK
        digest ^= digest >> 29
        slots[table[position // size] * size + position % size] = digest
        return digest

    def go_back(self, tables: Sequence[Sequence[int]], position: int, digest: int) -> None:
        """What was computed behind a position, which has this digest, counts no more."""

    def _window(self, table: Sequence[int], size: int, start: int, end: int) -> int:
        """The sum of the slots of positions start..end-1."""
        total = 0
        for index in range(start // size, -(-end // size)):
            first, at = index * size, table[index] * self._stride
            total += sum(self._slots[at + max(start - first, 0) : at + min(end - first, size)])
        return total

    def spoil(self, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        """Leaves behind what a computation that failed may leave in its slots: nothing of any use."""
        for table, (size, _, _) in zip(tables, self._groups, strict=True):
            for position in range(start, end):
                self._slots[table[position // size] * self._stride + position % size] = _SPOILT


class RecurrentDigests(PagedDigests):
    """With a table of rows of states behind those of blocks."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, states: StateGroup) -> None:
        super().__init__(groups, num_blocks)
        self.compute = super().compute  # type: ignore[method-assign]
        self._size = states.block_size
        self._rows = [_SPOILT] * states.num_rows
        self._salt = len(groups) * _GOLDEN & _MASK
        self._num_blocks = num_blocks

    def read(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Ids from the number of blocks on are those of rows."""
        contents = np.zeros((len(block_ids), self._stride), np.uint64)
        for place, block_id in enumerate(block_ids):
            if block_id < self._num_blocks:
                contents[place] = super().read([block_id]).view(np.uint64)
            else:
                contents[place, 0] = self._rows[block_id - self._num_blocks]
        return contents.view(np.uint8).reshape(len(block_ids), self.block_bytes)

    def write(self, block_id: int, contents: npt.NDArray[np.uint8]) -> None:
        if block_id < self._num_blocks:
            super().write(block_id, contents)
        else:
            self._rows[block_id - self._num_blocks] = int(contents.view(np.uint64)[0])

    def _seen(self, tables: Sequence[Sequence[int]], position: int) -> int:
        *blocks, rows = tables
        state = self._rows[rows[(position - 1) // self._size]] if position else 0
        return super()._seen(blocks, position) + state

    def _keep(self, tables: Sequence[Sequence[int]], position: int, digest: int) -> None:
        *blocks, rows = tables
        super()._keep(blocks, position, digest)
        self._rows[rows[position // self._size]] = digest ^ self._salt

    def go_back(self, tables: Sequence[Sequence[int]], position: int, digest: int) -> None:
        """What rows for guesses do in a real runner: the state behind that position is the request's."""
        self._rows[tables[-1][position // self._size]] = digest ^ self._salt

    def spoil(self, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        *blocks, rows = tables
        super().spoil(blocks, start, end)
        for position in range(start, end):
            self._rows[rows[position // self._size]] = _SPOILT
