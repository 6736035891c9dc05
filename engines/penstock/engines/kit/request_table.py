"""Live requests of a runner, as rows of numpy arrays: a step is a few array operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import PoolingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import EmbeddingSpan, NewRequest, PlacedTile, SchedulerOutput
from penstock.engines.errors import EngineError, ModelNotFoundError, PenstockError
from penstock.engines.kit.batch import GroupTables, Ints
from penstock.engines.kit.grammars import Grammars
from penstock.engines.kit.sampling import SamplingState
from penstock.engines.kit.sampling.plain import is_plain
from penstock.engines.kit.sampling.processors import ProcessorChain


class GridPositions:
    """Positions of a prompt's tokens as Qwen2-VL has them (arXiv:2409.12191): time, row and column. In text all three
    are the same. Those of an image begin where the text ends, and the text behind it goes on behind the largest."""

    def __init__(self, tiles: Sequence[PlacedTile], cell: int) -> None:
        """`cell`: as `ImageGrid` has it."""
        pieces, place, position = [], 0, 0
        for start, height, width in tiles:
            text = np.arange(position, position + start - place)
            position += start - place
            rows, columns = height // cell, width // cell
            pieces += [np.stack([text] * 3, 1), np.indices((1, rows, columns)).reshape(3, -1).T + position]
            position += max(rows, columns)
            place = start + rows * columns
        self._begin = np.concatenate(pieces)
        """Up to the end of the last image."""
        self._shift = position - place
        """Of the tokens behind it."""

    def between(self, first: int, stop: int) -> Ints:
        """[stop - first, 3], of the tokens from `first` up to `stop`."""
        behind = np.arange(max(first, len(self._begin)), stop) + self._shift
        return np.concatenate([self._begin[first:stop], np.stack([behind] * 3, 1)])


class RequestTable:
    """Rows are given out at a request's arrival and taken back when it is dropped.

    Steps under way are in the table as if they were done: `num_tokens` counts the tokens that they will sample, whose
    ids are put into `tokens` as they become known.
    """

    def __init__(
        self, info: ModelInfo, num_rows: int, adapter_slot: Callable[[str], int | None], grammars: Grammars
    ) -> None:
        """`adapter_slot` is `Model.adapter_slot`."""
        longest = info.max_model_len
        if not all(group.window for group in info.kv_groups):
            longest = min(longest, info.num_blocks * max(group.block_size for group in info.kv_groups))
        # One more than the longest request: the last token may be sampled without ever being computed.
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_rows, longest + 1), np.int32)
        self.block_tables: list[npt.NDArray[np.int32]] = [
            np.zeros((num_rows, -(-longest // group.block_size)), np.int32) for group in info.tables
        ]
        self.num_tokens: Ints = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens: Ints = np.zeros(num_rows, np.int64)
        self.pools: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.num_prompt_logprobs: Ints = np.zeros(num_rows, np.int64)
        """-1: none are wanted."""
        self.adapter_slots: Ints = np.zeros(num_rows, np.int64)
        self.sampling: list[SamplingState | None] = [None] * num_rows
        self.refused: dict[int, PenstockError] = {}
        """id -> why: requests that are never computed."""
        self.special: set[int] = set()
        """Ids of requests that get a vector, or logprobs of their prompt."""
        self.embeddings: dict[int, list[EmbeddingSpan]] = {}
        """By row, of requests that have some."""
        self.grids: dict[int, GridPositions] = {}
        """By row, of requests with images, if the model has such positions."""
        self._cell = info.image_grid.cell if info.image_grid is not None and info.has_grid_positions else 0
        self._groups = info.tables
        self._eos_token_ids = info.eos_token_ids
        self._vocab_size = info.vocab_size
        self._adapter_slot = adapter_slot
        self._grammars = grammars
        self._rows: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def apply(self, step: SchedulerOutput) -> None:
        """Takes in what a step says about requests, in the order that SchedulerOutput prescribes."""
        for request_id in step.dropped_ids:
            self._drop(request_id)
        for request in step.new_requests:
            self._add(request)
        for request_id, group, start, block_ids in step.block_updates:
            self.block_tables[group][self._rows[request_id], start : start + len(block_ids)] = block_ids

    def rows_of(self, request_ids: Sequence[int]) -> Ints:
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    def group_tables(self, rows: Ints, computed: Ints, total: Ints) -> tuple[GroupTables, ...]:
        """Copies, as far as a batch needs them that computes positions computed..total-1 of these rows."""
        tables = []
        for group, block_ids in zip(self._groups, self.block_tables, strict=True):
            end = -(-total // group.block_size)
            first = np.zeros_like(end)
            if group.window:
                first = np.maximum(computed - (group.window - 1), 0) // group.block_size
            tables.append(GroupTables(block_ids[rows, : end.max()], first, end))
        return tuple(tables)

    def suffice(self, groups: Sequence[GroupTables], total: Ints) -> bool:
        """Whether tables that `group_tables` gave for fewer positions of the same rows are also right for `total`, if
        no block was replaced."""
        return not any(
            group.window or (tables.end * group.block_size < total).any()
            for group, tables in zip(self._groups, groups, strict=True)
        )

    def clear(self) -> None:
        for request_id in list(self._rows):
            self._drop(request_id)

    def _add(self, request: NewRequest) -> None:
        self._drop(request.id)
        if not self._free:
            raise EngineError(
                f"request {request.id} is one more than the {len(self.num_tokens)} that there is room for"
            )
        row = self._free.pop()
        self._rows[request.id] = row
        count, params = len(request.token_ids), request.params
        self.tokens[row, :count] = request.token_ids
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table[row, : len(block_ids)] = block_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        slot = self._adapter_slot(request.adapter) if request.adapter else 0
        if slot is None:
            self.refused[request.id] = ModelNotFoundError(
                f"the adapter {request.adapter!r} is not loaded in this engine", param="model"
            )
        self.adapter_slots[row] = slot or 0
        if request.embeddings:
            self.embeddings[row] = request.embeddings
            if self._cell:
                self.grids[row] = GridPositions(request.tiles, self._cell)
        self.pools[row] = isinstance(params, PoolingParams)
        if isinstance(params, PoolingParams) or params.prompt_logprobs is not None:
            self.special.add(request.id)
        if isinstance(params, PoolingParams):
            self.num_prompt_logprobs[row] = -1
            self.sampling[row] = None
            return
        self.num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        if is_plain(params):
            self.sampling[row] = None
            return
        prompt, output = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
        grammar = None if request.grammar is None else self._grammars.start(request.grammar, output)
        processors = None
        if params.processors:
            try:
                processors = ProcessorChain(params.processors, prompt, output, self._vocab_size)
            except PenstockError as error:
                self.refused[request.id] = error
        self.sampling[row] = SamplingState.create(
            params, request.seed, self._eos_token_ids, prompt, output, grammar, processors
        )

    def _drop(self, request_id: int) -> None:
        row = self._rows.pop(request_id, None)
        self.refused.pop(request_id, None)
        self.special.discard(request_id)
        if row is not None:
            self.sampling[row] = None
            self.embeddings.pop(row, None)
            self.grids.pop(row, None)
            self._free.append(row)
