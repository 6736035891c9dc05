"""What the runner keeps of each live request, as rows of numpy arrays: a step is a few array operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.step import NewRequest, SchedulerOutput
from penstock.engines.errors import EngineError
from penstock.engines.kit.sampling import SamplingState


class RequestTable:
    """Rows are given out at a request's arrival and taken back when it is dropped."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, eos_token_ids: Sequence[int]) -> None:
        blocks = -(-max_model_len // block_size)
        # One more than the model's length: the last token may be sampled without ever being computed.
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.block_tables: npt.NDArray[np.int32] = np.zeros((num_rows, blocks), np.int32)
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.wants_prompt_logprobs: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.num_prompt_logprobs: npt.NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.sampling: list[SamplingState | None] = [None] * num_rows
        self._eos_token_ids = tuple(eos_token_ids)
        self._rows: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def apply(self, step: SchedulerOutput) -> None:
        """Takes in what a step says about requests, in the order that SchedulerOutput prescribes."""
        for request_id in step.dropped_ids:
            self._drop(request_id)
        for request in step.new_requests:
            self._add(request)
        for request_id, (index, block_ids) in step.new_block_ids.items():
            self.block_tables[self._rows[request_id], index : index + len(block_ids)] = block_ids

    def rows_of(self, request_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Adds one token to each of these rows."""
        at = self.num_tokens[rows]
        self.tokens[rows, at] = token_ids
        self.num_tokens[rows] = at + 1

    def clear(self) -> None:
        for request_id in list(self._rows):
            self._drop(request_id)

    def _add(self, request: NewRequest) -> None:
        self._drop(request.id)
        if not self._free:
            raise EngineError(f"request {request.id} is one more than the {len(self.num_tokens)} of max_num_seqs")
        row = self._free.pop()
        self._rows[request.id] = row
        count = len(request.token_ids)
        self.tokens[row, :count] = request.token_ids
        self.block_tables[row, : len(request.block_ids)] = request.block_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.wants_prompt_logprobs[row] = request.params.prompt_logprobs is not None
        self.num_prompt_logprobs[row] = request.params.prompt_logprobs or 0
        prompt, output = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
        self.sampling[row] = SamplingState.create(request.params, request.seed, self._eos_token_ids, prompt, output)

    def _drop(self, request_id: int) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.sampling[row] = None
            self._free.append(row)
