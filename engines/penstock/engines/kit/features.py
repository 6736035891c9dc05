"""A store of feature vectors, which draft heads are given of computed tokens: each lies at its token's place in the KV
cache. So prefix hits, copies and preemption need no books here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.kit.batch import Floats, Ints, StepBatch


class FeatureStore:
    """Vectors by block and slot."""

    def __init__(self, num_blocks: int, block_size: int, width: int, dtype: npt.DTypeLike) -> None:
        self.width = width
        self._rows: npt.NDArray[Any] = np.zeros((num_blocks, block_size, width), dtype)
        self._block_size = block_size

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """As bytes [blocks, bytes of a block], to be copied as keys and values are."""
        return self._rows.view(np.uint8).reshape(len(self._rows), -1)

    def put(self, places: tuple[Ints, Ints], features: Floats) -> None:
        """`places`: see `places_of`; `features` [T, width]."""
        self._rows[places] = features

    def read(self, blocks: Sequence[int] | Ints, start: int, end: int) -> Floats:
        """[end - start, width]: of positions start..end-1 of a request with these blocks."""
        positions = np.arange(start, end)
        table = np.asarray(blocks)
        rows: Floats = self._rows[table[positions // self._block_size], positions % self._block_size].astype(np.float32)
        return rows


def places_of(batch: StepBatch, block_size: int) -> tuple[Ints, Ints]:
    """Block and slot of every token of a batch, in the first group."""
    owners = np.repeat(np.arange(len(batch.scheduled)), batch.scheduled)
    entries, slots = np.divmod(batch.positions, block_size)
    return batch.groups[0].block_ids[owners, entries].astype(np.int64), slots
