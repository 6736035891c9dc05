"""Rows for the recurrent states behind guesses: where a state is that goes on from the last right one.

A step that verifies guesses leaves a state behind each token. That behind the last guess is in the row that the
request's table names, and those before it are in rows beside the pool. Once it is known which guesses were right, the
row behind the last right one is where the request's state is: its next step reads it there, and writes to the table's
row as always. So nothing is copied, and a wrong guess costs no token that has to be computed again.

The scheduler sees to it that a step has at most as many guesses as rows are left (`ModelInfo.guess_states`), and that
all of a request's tokens in it write to one entry of its table: a checkpoint is never beside the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput


class GuessStates:
    def __init__(self, info: ModelInfo) -> None:
        first = info.states.num_rows if info.states is not None else 0
        self._free = list(range(first, first + info.guess_states))
        self._kept: dict[int, int] = {}
        """id -> row, of requests whose newest state is beside the pool."""
        self._verifying: dict[int, list[int]] = {}
        """id -> rows, of the step that verifies guesses."""

    def forget(self, step: SchedulerOutput) -> None:
        """Frees the rows of requests that the step drops, or announces again: their states are in their tables."""
        for request_id in [*step.dropped_ids, *(request.id for request in step.new_requests)]:
            row = self._kept.pop(request_id, None)
            if row is not None:
                self._free.append(row)

    def take(
        self, request_ids: Sequence[int], guesses: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Of a batch, by the place of each request: the row that a state is read from, where it is beside the pool,
        and where `guesses` are verified the rows that states behind all tokens but the last are written to."""
        reads, writes = {}, {}
        for place, request_id in enumerate(request_ids):
            if request_id in self._kept:
                reads[place] = self._kept.pop(request_id)
            if request_id in guesses:
                writes[place] = self._verifying[request_id] = [self._free.pop() for _ in guesses[request_id]]
        self._free += reads.values()  # batches compute one after another: what this one reads, later ones may write to
        return reads, writes

    def verified(self, request_ids: Sequence[int], output: ModelRunnerOutput) -> None:
        """The step has given tokens: the last of them was sampled behind the last right guess."""
        if not self._verifying:
            return
        for request_id, tokens in zip(request_ids, output.sampled_token_ids, strict=True):
            rows = self._verifying.pop(request_id, None)
            if rows is None:
                continue
            num_right = len(tokens) - 1
            if 0 <= num_right < len(rows):
                self._kept[request_id] = rows[num_right]
                rows = rows[:num_right] + rows[num_right + 1 :]
            self._free += rows

    def reset(self) -> None:
        """The runner forgets all requests."""
        for rows in ([*self._kept.values()], *self._verifying.values()):
            self._free += rows
        self._kept.clear()
        self._verifying.clear()
