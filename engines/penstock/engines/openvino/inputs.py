"""Fills the model's step inputs: from a SchedulerOutput and the request table to tensors that are made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.step_sampling import Ints, Part, Wanted
from penstock.engines.openvino.decoder import STEP_INPUTS


class StepInputs:
    """Owns the tensors behind the inputs of one infer request. Not for use from several threads."""

    def __init__(self, request: Any, table: RequestTable, block_size: int, capacity: int) -> None:
        """`capacity`: for how many values there is room at the start."""
        self._table = table
        self._block_size = block_size
        self._buffers = {name: _Buffer(request, name, *spec, capacity) for name, spec in STEP_INPUTS.items()}

    def fill(self, part: Part, wanted: Wanted) -> None:
        """The requests of a part of a step, and whose logits are needed of it."""
        rows, computed, scheduled = part.rows, part.computed, part.scheduled
        table, buffers = self._table, self._buffers
        total = computed + scheduled
        begins = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(scheduled, out=begins[1:])
        if begins[-1] == len(rows):
            owner, positions = rows, computed
        else:
            owner = np.repeat(rows, scheduled)
            positions = np.arange(begins[-1]) + np.repeat(computed - begins[:-1], scheduled)
        buffers["input_ids"].put(table.tokens[owner, positions])
        buffers["position_ids"].put(positions)
        buffers["past_lens"].put(computed)
        buffers["subsequence_begins"].put(begins)
        buffers["max_context_len"].put(total.max())
        self._fill_block_tables(rows, total)
        buffers["sampled_tokens_indices"].put(wanted.offsets(part, begins))

    def _fill_block_tables(self, rows: Ints, total: Ints) -> None:
        used = -(-total // self._block_size)
        begins = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(used, out=begins[1:])
        tables = self._table.block_tables[rows, : used.max()]
        present = np.arange(tables.shape[1]) < used[:, None]
        self._buffers["block_indices"].put(tables[present])
        self._buffers["block_indices_begins"].put(begins)


class _Buffer:
    """A tensor that keeps its memory and is given a new length each step; it grows by doubling."""

    def __init__(self, request: Any, name: str, dtype: type[np.generic], shape: list[int], capacity: int) -> None:
        self._request = request
        self._name = name
        self._dtype = dtype
        self._scalar = not shape
        self._grow(1 if self._scalar else capacity)

    def put(self, values: npt.NDArray[Any]) -> None:
        if self._scalar:
            self._memory[0] = values
            return
        count = len(values)
        if count > len(self._memory):
            self._grow(2 * count)
        self._tensor.shape = [count]
        self._memory[:count] = values

    def _grow(self, capacity: int) -> None:
        self._memory = np.zeros(capacity, self._dtype)
        self._tensor = ov.Tensor(self._memory.reshape(()) if self._scalar else self._memory, shared_memory=True)
        self._request.set_tensor(self._name, self._tensor)
