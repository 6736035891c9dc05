"""A draft model: a smaller model that guesses what a runner's model will say, for that one to verify.

Its KV cache has the same blocks as the model's own: position p of a request is in the same block and slot of both. So
prefix hits, copies and preemption need no books here. It computes only what it needs for guesses, when it is asked for
some: what a block holds of it is noted with the block.

A draft head (EAGLE-3, MTP) is such a model, too. At position p it gets token p + 1, and the features that the model
gave of position p. Behind the last of these it gets its own hidden state of the position before, and what it computes
there does not stay. What it has at the end of a full block depends on the first token behind the block: where requests
share a block, one of them may have that of another there, which can only make a guess worse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from penstock.engines.contract.step import TO_BE_DRAFTED, Drafting, SchedulerOutput
from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, Floats, Ints, Model, StepBatch
from penstock.engines.kit.features import FeatureStore
from penstock.engines.kit.request_table import RequestTable

_BUFFER = 0


@dataclass(frozen=True)
class HeadInputs:
    """What makes a draft model a draft head."""

    features: FeatureStore
    """Of all tokens that the model has computed."""
    token_ids: Ints | None = None
    """The token that each of its logits is for; None: the token with this number."""


@dataclass(slots=True)
class _Draft:
    """A request that asks for guesses."""

    id: int
    row: int
    """Of the request table."""
    last: int
    """The position where the draft model gets its last known token."""
    count: int
    """Guesses to make."""
    start: int
    """The first position that the draft model has not computed, at most `last`."""
    scheduled: int = 0
    """Tokens of the forward pass."""
    hidden: Floats | None = None
    """[1, width], of a draft head behind `last`: its hidden state of the position before."""


class DraftModel:
    """Guesses greedily, one more token of every request that asks for it in each forward pass."""

    def __init__(
        self,
        model: Model,
        block_size: int,
        num_blocks: int,
        max_len: int,
        max_tokens: int,
        head: HeadInputs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_len`: positions that it can compute; `max_tokens`: most of a forward pass; `head`: of a draft head."""
        self._model = model
        self._block_size = block_size
        self._max_len = max_len
        self._max_tokens = max_tokens
        self._head = head
        self._lead = 0 if head is None else 1
        """By how many positions its tokens come earlier than in the model."""
        self._clock = clock
        self._filled: Ints = np.zeros(num_blocks, np.int64)
        """Of each block: how many of its slots, from the first on, hold what was computed for the tokens there."""
        self._guessed: dict[int, tuple[int, list[int]]] = {}
        """id -> its newest guesses that were computed on, and the position of the first. As far as they were right,
        they need not be computed again. Not of a draft head."""
        self._copies: dict[int, int] = {}
        """Blocks that the newest step begins with copies of others, and those others."""

    def follow(self, step: SchedulerOutput) -> None:
        """Takes in what a step says about blocks. For every step, in order. Rows with recurrent states of the model are
        none of them: they have numbers of their own, in a second group, or behind those of blocks."""
        for block_id, _ in step.block_loads:
            if block_id < len(self._filled):
                self._filled[block_id] = 0  # it comes without what the draft model would have computed
        self._copies.clear()
        for source, destination in step.block_copies:
            self._filled[destination] = self._filled[source]
            self._copies[destination] = self._copies.get(source, source)
        if step.block_copies:
            self._model.copy_blocks(step.block_copies)
        for request_id in step.dropped_ids:
            self._guessed.pop(request_id, None)
        for update in step.block_updates:
            if update.group == 0:
                self._filled[update.block_ids] = 0
        if step.new_requests:
            computed = dict(zip(step.request_ids, step.num_computed_tokens, strict=True))
            for request in step.new_requests:
                self._guessed.pop(request.id, None)
                self._limit(request.block_ids[0], computed.get(request.id, 0))

    def complete(
        self, step: SchedulerOutput, table: RequestTable, under_way: Set[int]
    ) -> tuple[SchedulerOutput, Drafting | None]:
        """For every step, in order: the step with guesses, if some are to be made. `under_way`: as for `guess`."""
        self.follow(step)
        if not any(TO_BE_DRAFTED in guesses for guesses in step.drafts.values()):
            return step, None
        return self.guess(step, table, under_way)

    def guess(
        self, step: SchedulerOutput, table: RequestTable, under_way: Set[int] = frozenset()
    ) -> tuple[SchedulerOutput, Drafting]:
        """The step with guesses in place of `TO_BE_DRAFTED`, and what was done for it. `under_way`: requests of steps
        that are not done.

        Requests get fewer where their context is too long for the draft model, and none while it has more to catch up
        with than `max_tokens`: their prompt, or what was generated while nobody asked for guesses. A draft head makes
        none for a request that is under way: the model has not given all features of its prompt.
        """
        drafting = Drafting({i: 0 for i, guesses in step.drafts.items() if TO_BE_DRAFTED in guesses})
        guesses: dict[int, list[int]] = {i: [] for i in drafting.num_guesses}
        places = dict(zip(step.request_ids, step.num_computed_tokens, strict=True))
        ids = [i for i in guesses if self._head is None or i not in under_way]
        drafts = self._share_out(self._drafts_for(step, table, places, ids))
        while drafts:
            tokens, hidden = self._forward(drafts, table, drafting)
            following = []
            for n, (draft, token) in enumerate(zip(drafts, tokens, strict=True)):
                end = draft.start + draft.scheduled
                if end <= draft.last + 1:  # known tokens, which stay
                    self._fill(table.block_tables[0][draft.row], draft.start, end)
                if end > draft.last:
                    guesses[draft.id].append(token)
                    table.tokens[draft.row, end + self._lead] = token
                    if len(guesses[draft.id]) < draft.count:
                        own = None if hidden is None else hidden[n : n + 1]
                        following.append(replace(draft, start=end, scheduled=1, hidden=own))
            drafts = following
        for request_id, tokens in guesses.items():
            drafting.num_guesses[request_id] = len(tokens)
            if self._head is None:
                self._guessed[request_id] = places[request_id] + 1, tokens[:-1]
        return _with_guesses(step, guesses), drafting

    def reset(self) -> None:
        """The requests are forgotten; what blocks hold stays."""
        self._guessed.clear()

    # -- what is computed ------------------------------------------------------------------------------------

    def _drafts_for(
        self, step: SchedulerOutput, table: RequestTable, places: Mapping[int, int], ids: list[int]
    ) -> list[_Draft]:
        """Those of `ids` that can get guesses. `places`: of every request's last known token."""
        drafts = []
        for request_id, row in zip(ids, table.rows_of(ids), strict=True):
            last = places[request_id] - self._lead
            count = min(len(step.drafts[request_id]), self._max_len - last)
            if count > 0 and last >= 0:
                start = self._missing_from(request_id, int(row), last, table)
                drafts.append(_Draft(request_id, int(row), last, count, start))
        return drafts

    def _missing_from(self, request_id: int, row: int, last: int, table: RequestTable) -> int:
        """The first position up to `last` that has to be computed; `last` itself always has."""
        blocks = table.block_tables[0][row]
        start = self._num_filled(blocks, last)
        first, guesses = self._guessed.get(request_id, (-1, []))
        if first == start:
            known = table.tokens[row, first : last + 1].tolist()
            right = next((n for n, pair in enumerate(zip(known, guesses, strict=False)) if pair[0] != pair[1]), None)
            end = first + (min(len(known), len(guesses)) if right is None else right)
            self._fill(blocks, first, end)
            start = min(end, last)
        return start

    def _share_out(self, drafts: list[_Draft]) -> list[_Draft]:
        """Gives each, in order, the tokens that it has to compute, as far as a forward pass has room."""
        left = self._max_tokens
        for draft in drafts:
            draft.scheduled = min(draft.last + 1 - draft.start, left)
            left -= draft.scheduled
        return [draft for draft in drafts if draft.scheduled]

    def _forward(
        self, drafts: Sequence[_Draft], table: RequestTable, drafting: Drafting
    ) -> tuple[list[int], Floats | None]:
        """One forward pass: the likeliest token behind each request's last one in it, and a draft head's hidden state
        there."""
        began = self._clock()
        rows = np.array([draft.row for draft in drafts])
        computed = np.array([draft.start for draft in drafts])
        scheduled = np.array([draft.scheduled for draft in drafts])
        begins = np.zeros(len(drafts) + 1, np.int64)
        np.cumsum(scheduled, out=begins[1:])
        positions = np.arange(begins[-1]) + np.repeat(computed - begins[:-1], scheduled)
        batch = StepBatch(
            token_ids=table.tokens[np.repeat(rows, scheduled), positions + self._lead],
            positions=positions,
            begins=begins,
            computed=computed,
            scheduled=scheduled,
            groups=table.group_tables(rows, computed, computed + scheduled),
            logits_at=begins[1:] - 1,
            adapter_slots=np.zeros(len(drafts), np.int64),
            wants_hidden=self._head is not None,
            features=None if self._head is None else self._features(self._head, drafts, table),
        )
        self._model.prepare(_BUFFER, batch)
        self._model.start(_BUFFER, NO_INTS, NO_TOKENS)
        outputs = self._model.wait(_BUFFER)
        tokens = outputs.logits.argmax(axis=1)
        if self._head is not None and self._head.token_ids is not None:
            tokens = self._head.token_ids[tokens]
        hidden = None if outputs.hidden is None else outputs.hidden.copy()
        drafting.passes.append((len(positions), self._clock() - began))
        return tokens.tolist(), hidden

    def _features(self, head: HeadInputs, drafts: Sequence[_Draft], table: RequestTable) -> Floats:
        """[T, width]. The model makes a step's copies when the step begins, which is later."""
        pieces = []
        for draft in drafts:
            if draft.hidden is not None:
                pieces.append(draft.hidden)
                continue
            end = draft.start + draft.scheduled
            blocks = table.block_tables[0][draft.row, : -(-end // self._block_size)].tolist()
            blocks = [self._copies.get(block, block) for block in blocks]
            pieces.append(head.features.read(blocks, draft.start, end))
        return np.concatenate(pieces)

    # -- what blocks hold ------------------------------------------------------------------------------------

    def _num_filled(self, blocks: Sequence[int] | Ints, limit: int) -> int:
        """Positions from the first on, at most `limit`, that are computed in a request's `blocks`."""
        filled = self._filled[blocks[: -(-limit // self._block_size)]]
        partial = np.flatnonzero(filled < self._block_size)
        count = int(partial[0] * self._block_size + filled[partial[0]]) if len(partial) else limit
        return min(count, limit)

    def _fill(self, blocks: Sequence[int] | Ints, start: int, end: int) -> None:
        """Positions start..end-1 are computed, as all before them."""
        entries = np.arange(start // self._block_size, -(-end // self._block_size))
        self._filled[np.asarray(blocks)[entries]] = np.minimum(self._block_size, end - entries * self._block_size)

    def _limit(self, blocks: Sequence[int], num_computed: int) -> None:
        """Positions from `num_computed` on get other tokens than the blocks had there."""
        entry, slot = divmod(num_computed, self._block_size)
        first, fresh = blocks[entry : entry + 1], blocks[entry + 1 :]
        self._filled[first] = np.minimum(self._filled[first], slot)
        self._filled[fresh] = 0


def _with_guesses(step: SchedulerOutput, guesses: dict[int, list[int]]) -> SchedulerOutput:
    """Requests that get fewer guesses than they asked for compute fewer tokens."""
    drafts = step.drafts | guesses
    scheduled = [
        count - len(step.drafts[i]) + len(drafts[i]) if i in guesses else count
        for i, count in zip(step.request_ids, step.num_scheduled_tokens, strict=True)
    ]
    return replace(
        step,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled),
        drafts={i: tokens for i, tokens in drafts.items() if tokens},
    )
