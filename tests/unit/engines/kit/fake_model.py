"""A model for tests of the runner kit: what a token sees is read from a paged cache, and its logits depend on all of
it, so that a wrong token, position, block or copy changes what is sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.kit.batch import Floats, Int32s, Ints, Outputs, StepBatch
from penstock.kvcache import KVGroup

VOCAB_SIZE = 7
POISON = VOCAB_SIZE - 1
"""Logits that see it directly before them are NaN; it is never likely."""
_UNWRITTEN = -1


def logits_after(context: Sequence[int], windows: Sequence[int]) -> Floats:
    """Mostly a cycle, so that guesses are often right; the rest depends on all that each window shows."""
    seen = tuple(tuple(context[-window:]) if window else tuple(context) for window in windows)
    noise = random.Random(repr((seen, len(context))))
    logits = np.array([noise.gauss(0, 1) for _ in range(VOCAB_SIZE)], np.float32)
    logits[(context[-1] + 1) % POISON] += 2.5
    logits[POISON] = np.nan if context[-1] == POISON else -9
    return logits


class FakeModel:
    """Raises AssertionError for calls that `Model` does not allow, and for reads of what was never written."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, num_buffers: int, *, lazy: bool = False) -> None:
        self.num_buffers = num_buffers
        self._groups = groups
        self._lazy = lazy
        """Computes when it is waited for, else when it is started: a device does either, or something between."""
        slots = max(group.block_size for group in groups)
        self._tokens = np.full((num_blocks, slots), _UNWRITTEN)
        self._positions = np.full((num_blocks, slots), _UNWRITTEN)
        self._prepared: dict[int, StepBatch] = {}
        self._outputs: dict[int, Outputs] = {}
        self._computing: int | None = None
        self.num_batches = 0
        self.fails = False
        """The next batch raises."""
        self.refused_slot: int | None = None
        """Batches with a request of this adapter cannot be started."""

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=64,
            kv_groups=tuple(self._groups),
            num_blocks=len(self._tokens),
            eos_token_ids=(),
            runner="fake",
            supports_pooling=True,
            supports_drafts=True,
        )

    def adapter_slot(self, key: str) -> int | None:
        return {"a": 1}.get(key)

    def prepare(self, buffer: int, batch: StepBatch) -> None:
        assert self._computing != buffer
        self._prepared[buffer] = batch

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._computing is None
        for source, destination in copies:
            self._tokens[destination] = self._tokens[source]
            self._positions[destination] = self._positions[source]

    def start(self, buffer: int, late: Ints, token_ids: Int32s) -> None:
        assert self._computing is None
        if self.refused_slot in self._prepared[buffer].adapter_slots:
            raise RuntimeError("the device refuses")
        self._computing = buffer
        self._prepared[buffer].token_ids[late] = token_ids
        if not self._lazy:
            self._outputs[buffer] = self._compute(self._prepared[buffer])

    def wait(self, buffer: int) -> Outputs:
        assert self._computing == buffer
        self._computing = None
        if self._lazy:
            self._outputs[buffer] = self._compute(self._prepared[buffer])
        if self.fails:
            self.fails = False
            raise RuntimeError("the device fell over")
        return self._outputs[buffer]

    def _compute(self, batch: StepBatch) -> Outputs:
        self.num_batches += 1
        assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB_SIZE)).all(), "no such token"
        owners = np.repeat(np.arange(len(batch.computed)), batch.scheduled)
        for i, token, position in zip(owners, batch.token_ids, batch.positions, strict=True):
            for group, tables in zip(self._groups, batch.groups, strict=True):
                assert tables.first[i] <= position // group.block_size < tables.end[i]
                block, slot = tables.block_ids[i, position // group.block_size], position % group.block_size
                self._tokens[block, slot], self._positions[block, slot] = token, position
        logits, hidden = [np.zeros((0, VOCAB_SIZE), np.float32)], [np.zeros((0, 2), np.float32)]
        windows = [group.window for group in self._groups]
        for at in batch.logits_at:
            context = self._context(batch, int(owners[at]), int(batch.positions[at]))
            logits.append(logits_after(context, windows)[None])
            hidden.append(np.array([[len(context), sum(context)]], np.float32))
        return Outputs(np.concatenate(logits), np.concatenate(hidden) if batch.wants_hidden else None)

    def _context(self, batch: StepBatch, i: int, position: int) -> list[int]:
        """All tokens up to this position, as far as some group sees them; 0 for those that none does."""
        context = [0] * (position + 1)
        for group, tables in zip(self._groups, batch.groups, strict=True):
            first = max(0, position - group.window + 1) if group.window else 0
            for p in range(first, position + 1):
                assert p // group.block_size >= tables.first[i]
                block, slot = tables.block_ids[i, p // group.block_size], p % group.block_size
                assert self._positions[block, slot] == p
                context[p] = int(self._tokens[block, slot])
        return context
