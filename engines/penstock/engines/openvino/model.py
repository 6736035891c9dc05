"""Compiled decoder with its buffers, as the runner kit's `Model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, Floats, GroupTables, Int32s, Ints, Outputs, StepBatch
from penstock.engines.kit.features import places_of
from penstock.engines.openvino.decoder_inputs import (
    EMBEDDINGS,
    EMBEDDINGS_AT,
    FEATURES,
    GRID_POSITIONS,
    GROUP_INPUTS,
    ImageInputs,
    Input,
    group_suffix,
    step_inputs,
)
from penstock.engines.openvino.delta_prompts import PROMPT_INPUTS, prompt_inputs, requests_in_runs, takes_runs
from penstock.engines.openvino.kv_cache import OpenVINOKVCache
from penstock.engines.openvino.lora import LOGITS_AT, SLOTS, OpenVINOAdapters, Rows
from penstock.engines.openvino.recurrent import (
    DELTA_INPUTS,
    STATE_INPUTS,
    StateTables,
    delta_inputs,
    state_inputs,
)


class BufferedDecoder:
    """Each buffer has an infer request of each compiled model; inputs and outputs are theirs alone.

    The infer requests of a compiled model share its one stream and its working memory, and all of them the KV cache:
    `StepRunner` sees to it that one runs at a time. What an infer request gave stays while another one runs.
    """

    num_buffers = 2

    cache: OpenVINOKVCache

    def __init__(
        self,
        compiled: Sequence[tuple[int, Any]],
        num_groups: int,
        block_size: int,
        capacity: int,
        adapters: OpenVINOAdapters | None,
        features: int = 0,
        has_states: bool = False,
        images: ImageInputs | None = None,
    ) -> None:
        """`compiled`: the fewest tokens for which a compiled model is used, and the model, by ascending tokens;
        `capacity`: tokens for which there is room at the start; `adapters`: None where the models have no inputs for
        them; `features`: width of those that batches have, 0: none; `has_states`: of recurrent
        layers."""
        self._least_tokens = [least for least, _ in compiled]
        self._block_size = block_size
        self._adapters = adapters
        inputs = step_inputs(num_groups)
        if adapters is not None:
            inputs |= {SLOTS: (np.int32, [-1]), LOGITS_AT: (np.int64, [-1])}
        self._has_states = has_states
        self._states: StateTables | None = None
        self._takes_runs = takes_runs(compiled[0][1])
        if has_states:
            inputs |= STATE_INPUTS
        if self._takes_runs:
            inputs |= DELTA_INPUTS | PROMPT_INPUTS
        if features:
            inputs[FEATURES] = (np.float32, [-1, features])
        self._images = images
        if images is not None:
            inputs |= images.kinds
            self._no_embeddings: tuple[Ints, Floats] = NO_INTS, np.zeros((0, *inputs[EMBEDDINGS][1][1:]), np.float32)
            """What batches without images have."""
        self._buffers = [
            _Buffer([model.create_infer_request() for _, model in compiled], inputs, num_groups, capacity)
            for _ in range(self.num_buffers)
        ]

    def use_cache(self, cache: OpenVINOKVCache, states: StateTables | None = None) -> None:
        """Before the first batch, or in place of a smaller cache."""
        self.cache, self._states = cache, states
        for buffer in self._buffers:
            for request in buffer.requests:
                cache.bind(request)
                if states is not None:
                    states.bind(request)

    def adapter_slot(self, key: str) -> int | None:
        """`Model.adapter_slot`."""
        return None if self._adapters is None else self._adapters.slot(key)

    def prepare(self, buffer: int, batch: StepBatch) -> None:
        """`Model.prepare`."""
        target, inputs = self._buffers[buffer], self._buffers[buffer].inputs
        num_tokens = len(batch.positions)
        chosen = next(n for n in reversed(range(len(self._least_tokens))) if num_tokens >= self._least_tokens[n])
        target.chosen = target.requests[chosen]
        target.wants_hidden = batch.wants_hidden
        inputs["input_ids"].put(batch.token_ids)
        inputs["position_ids"].put(batch.positions)
        inputs["subsequence_begins"].put(batch.begins)
        inputs["sampled_tokens_indices"].put(batch.logits_at)
        for number, group in enumerate(batch.groups[: len(target.group_inputs)]):
            of_group = target.group_inputs[number]
            past_lens = batch.computed - group.first * self._block_size
            of_group["past_lens"].put(past_lens)
            of_group["max_context_len"].put((past_lens + batch.scheduled).max())
            if number >= len(target.groups) or target.groups[number] is not group:
                self._put_blocks(of_group, group)
        target.groups = batch.groups
        if self._has_states:
            self._put_states(target, batch, batch.groups[-1])
        if batch.features is not None:
            inputs[FEATURES].put(batch.features)
        if self._images is not None:
            self._put_images(self._images, inputs, batch)
        if self.cache.features is not None:
            target.places = places_of(batch, self._block_size)
        if self._adapters is not None:
            self._put_adapters(self._adapters, target, batch)

    def _put_states(self, target: _Buffer, batch: StepBatch, tables: GroupTables) -> None:
        inputs: dict[str, npt.NDArray[Any]] = {**state_inputs(batch, tables, self._block_size)}
        if self._takes_runs:
            requests = requests_in_runs(batch, tables, self._block_size)
            inputs |= delta_inputs(batch, inputs, requests)
            runs, target.kept_rows = prompt_inputs(batch, tables, self._block_size, requests)
            inputs |= runs
        for name, values in inputs.items():
            target.inputs[name].put(values)

    def _put_images(self, images: ImageInputs, inputs: Mapping[str, _Input], batch: StepBatch) -> None:
        places, rows = batch.embeddings or self._no_embeddings
        inputs[EMBEDDINGS_AT].put(places)
        inputs[EMBEDDINGS].put(rows)
        if images.has_grid_positions:
            positions = batch.positions[:, None] if batch.grid_positions is None else batch.grid_positions
            inputs[GRID_POSITIONS].put(positions)

    def _put_adapters(self, adapters: OpenVINOAdapters, target: _Buffer, batch: StepBatch) -> None:
        slots = batch.adapter_slots
        of_tokens = slots if len(slots) == len(batch.positions) else np.repeat(slots, batch.scheduled)
        target.inputs[SLOTS].put(of_tokens)
        if slots is not target.slots:
            target.slots, target.rows = slots, adapters.choose(slots, target.rows)
        if target.bound.get(target.chosen) != target.rows:
            adapters.bind(target.chosen, target.rows)
            target.bound[target.chosen] = target.rows
        changes = adapters.change_logits(target.rows)
        target.added_at = np.flatnonzero(of_tokens[batch.logits_at]) if changes else NO_INTS
        target.inputs[LOGITS_AT].put(target.added_at)

    def _put_blocks(self, inputs: Mapping[str, _Input], group: GroupTables) -> None:
        """Leaves out the blocks behind the window: attention goes by distance, and keys are rotated by their true
        positions already."""
        begins = np.zeros(len(group.end) + 1, np.int64)
        np.cumsum(group.end - group.first, out=begins[1:])
        entries = np.arange(group.block_ids.shape[1])
        present = (entries >= group.first[:, None]) & (entries < group.end[:, None])
        inputs["block_indices"].put(group.block_ids[present])
        inputs["block_indices_begins"].put(begins)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """`Model.copy_blocks`."""
        self.cache.copy_blocks(copies)

    def start(self, buffer: int, late: Ints, token_ids: Int32s) -> None:
        """`Model.start`."""
        target = self._buffers[buffer]
        if len(late):
            target.inputs["input_ids"].memory[late] = token_ids
        target.chosen.start_async()

    def wait(self, buffer: int) -> Outputs:
        """`Model.wait`; the arrays are views of the infer request's outputs."""
        target = self._buffers[buffer]
        target.chosen.wait()
        if self.cache.features is not None:
            self.cache.features.put(target.places, target.chosen.get_tensor(FEATURES).data)
        if self._states is not None and len(target.kept_rows):
            self._states.put_kept(target.kept_rows)
        logits = target.chosen.get_output_tensor(0).data
        if len(target.added_at):
            logits[target.added_at] += target.chosen.get_output_tensor(2).data
        hidden = target.chosen.get_output_tensor(1).data if target.wants_hidden else None
        return Outputs(logits, hidden)


class _Buffer:
    """Infer requests, of which a batch takes one, and the inputs that they share."""

    def __init__(self, requests: list[Any], inputs: Mapping[str, Input], num_groups: int, capacity: int) -> None:
        self.requests = requests
        self.chosen = requests[0]
        self.wants_hidden = False
        self.groups: tuple[GroupTables, ...] = ()
        """What the inputs hold."""
        self.inputs = {name: _Input(requests, name, *kind, capacity) for name, kind in inputs.items()}
        self.group_inputs = [
            {name: self.inputs[name + group_suffix(number, num_groups)] for name in GROUP_INPUTS}
            for number in range(num_groups)
        ]
        self.places: tuple[Ints, Ints] = (NO_INTS, NO_INTS)
        """Where the features of its tokens are kept."""
        self.kept_rows: Int32s = NO_TOKENS
        """Of tables of states: where those go that the graph does not write itself."""
        self.slots: Ints | None = None
        """Of the requests' adapters."""
        self.rows: Rows = ()
        """Where these adapters are."""
        self.bound: dict[Any, Rows] = {}
        """What each infer request reads."""
        self.added_at: Ints = NO_INTS
        """Rows of the logits that adapters add to."""


class _Input:
    """A tensor that keeps its memory and is given a new length for each batch; it grows by doubling."""

    def __init__(
        self, requests: list[Any], name: str, dtype: type[np.generic], shape: list[int], capacity: int
    ) -> None:
        self._requests = requests
        self._name = name
        self._dtype = dtype
        self._scalar = not shape
        self._row = shape[1:]
        self._values: npt.NDArray[Any] | None = None
        """What `put` was last called with: arrays that have not changed come again as they are."""
        self._grow(1 if self._scalar else capacity)

    def put(self, values: npt.NDArray[Any]) -> None:
        if self._scalar:
            self.memory[0] = values
            return
        if values is self._values:
            return
        self._values = values
        count = len(values)
        if count > len(self.memory):
            self._grow(2 * count)
        self._tensor.shape = [count, *self._row]
        self.memory[:count] = values

    def _grow(self, capacity: int) -> None:
        self.memory = np.zeros((capacity, *self._row), self._dtype)
        self._tensor = ov.Tensor(self.memory.reshape(()) if self._scalar else self.memory, shared_memory=True)
        for request in self._requests:
            request.set_tensor(self._name, self._tensor)
