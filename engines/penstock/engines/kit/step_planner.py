"""`StepPlanner`: what a model has to compute for a step, as arrays, from the scheduler's decisions and the table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.kit.batch import NO_INTS, Batch, Ints
from penstock.engines.kit.planned_step import PlannedBatch
from penstock.engines.kit.request_table import RequestTable


class StepPlanner:
    """Reads the table, and writes into it what is known of a step before it computes: guesses, forced tokens, and how
    many tokens its requests will have."""

    def __init__(self, table: RequestTable, max_scored: int) -> None:
        """`max_scored`: positions of prompts whose logits may be in one batch."""
        self._table = table
        self._max_scored = max_scored
        self._last: tuple[list[int], PlannedBatch] | None = None
        """The newest step's requests and batch, if it `only_decodes`."""

    def plan(self, step: SchedulerOutput, *, is_first: bool) -> list[PlannedBatch]:
        """The batches of a step that the table has `apply`ed, which are computed one after the other.

        There is one, or none if nothing is computed, unless prompt logprobs need more logits than memory should be
        spent on: then those prompts are computed by themselves, in pieces. `is_first`: no step is under way before it,
        so all tokens that it starts from are known.
        """
        again = self._plan_again(step, is_first)
        batches = [again] if again is not None else list(self._plan(step, is_first))
        self._last = (step.request_ids, batches[0]) if len(batches) == 1 and batches[0].only_decodes else None
        return batches

    def reset(self) -> None:
        """The next step has nothing to do with those before it."""
        self._last = None

    def _plan_again(self, step: SchedulerOutput, is_first: bool) -> PlannedBatch | None:
        """What `_plan` gives for a step in which the requests of the step before get one more token each, made from
        that one's batch; None for other steps."""
        if self._last is None or step.new_requests or step.drafts or step.forced or step.request_ids != self._last[0]:
            return None
        table, last = self._table, self._last[1]
        positions = last.batch.positions + 1
        if positions.tolist() != step.num_computed_tokens or step.total_num_scheduled_tokens != len(positions):
            return None
        groups, places = last.batch.groups, last.places + 1
        if step.block_updates or not table.suffice(groups, places):
            groups = table.group_tables(last.rows, positions, places)
        batch = Batch(
            token_ids=table.tokens[last.rows, positions],
            positions=positions,
            begins=last.batch.begins,
            computed=positions,
            scheduled=last.batch.scheduled,
            groups=groups,
            logits_at=last.batch.logits_at,
            adapter_slots=last.batch.adapter_slots,
            wants_hidden=False,
        )
        table.num_tokens[last.rows] = places + 1
        return PlannedBatch(
            batch=batch,
            indices=last.indices,
            rows=last.rows,
            sampling=last.sampling,
            sampling_rows=last.rows,
            places=places,
            states=last.states,
            late=NO_INTS if is_first else batch.logits_at,
            late_places=positions,
            verifying=[],
            drafts=[],
            forced={},
            pooling=[],
            prompts=[],
        )

    def _plan(self, step: SchedulerOutput, is_first: bool) -> Iterator[PlannedBatch]:
        table = self._table
        if not step.request_ids:
            return
        rows = table.rows_of(step.request_ids)
        computed = np.array(step.num_computed_tokens, np.int64)
        scheduled = np.array(step.num_scheduled_tokens, np.int64)
        indices = np.arange(len(rows))
        if table.refused:
            indices = np.flatnonzero([request_id not in table.refused for request_id in step.request_ids])
        scored = indices[(table.num_prompt_logprobs[rows] >= 0)[indices]]
        scored = scored[(computed < table.num_prompt_tokens[rows] - 1)[scored]]
        if len(scored):
            scored = scored if scheduled[scored].sum() > self._max_scored else NO_INTS
            indices = np.setdiff1d(indices, scored)
        if len(indices):
            yield self._batch(step, is_first, indices, rows[indices], computed[indices], scheduled[indices])
        for i in scored:
            end = int(computed[i] + scheduled[i])
            for start in range(int(computed[i]), end, self._max_scored):
                count = min(self._max_scored, end - start)
                piece = np.array([i]), rows[[i]], np.array([start]), np.array([count])
                yield self._batch(step, is_first, *piece)

    def _batch(
        self, step: SchedulerOutput, is_first: bool, indices: Ints, rows: Ints, computed: Ints, scheduled: Ints
    ) -> PlannedBatch:
        """Of S requests of the step: their `indices` in it, their rows of the table, and how many of their tokens have
        been computed and are computed now; each [S]."""
        table = self._table
        total, num_tokens = computed + scheduled, table.num_tokens[rows]
        begins = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(scheduled, out=begins[1:])
        sampling = np.flatnonzero(total >= num_tokens)
        pooling = sampling[table.pools[rows[sampling]]].tolist()
        verifying = [i for i in sampling.tolist() if step.request_ids[indices[i]] in step.drafts] if step.drafts else []
        if pooling or verifying:
            sampling = np.setdiff1d(sampling, pooling + verifying)
        drafts = [step.drafts[step.request_ids[indices[i]]] for i in verifying]
        for i, guesses in zip(verifying, drafts, strict=True):
            table.tokens[rows[i], num_tokens[i] : num_tokens[i] + len(guesses)] = guesses
        forced = self._put_forced(step, indices, rows, sampling) if step.forced else {}
        prompts = self._scored_positions(rows, computed, total)
        last_ones = begins[1:][sampling] - 1
        logits_at = last_ones
        if pooling or verifying or prompts:
            spans = [(begins[i + 1], 1 + len(guesses)) for i, guesses in zip(verifying, drafts, strict=True)]
            spans += [(begins[i + 1], 1) for i in pooling]
            spans += [(begins[i] + first - computed[i] + count, count) for i, first, count in prompts]
            logits_at = np.concatenate([last_ones, *(np.arange(end - count, end) for end, count in spans)])
        late, places = NO_INTS if is_first else last_ones, num_tokens[sampling]
        late_places, sampling_rows = places - 1, rows[sampling]
        if forced:
            counts = np.array([len(forced.get(n, ())) for n in range(len(sampling))], np.int64)
            late, places = late - counts if len(late) else late, places + counts
        table.num_tokens[sampling_rows] = places + 1
        owners, positions = _tokens(rows, begins, computed, scheduled)
        batch = Batch(
            token_ids=table.tokens[owners, positions],
            positions=positions,
            begins=begins,
            computed=computed,
            scheduled=scheduled,
            groups=table.group_tables(rows, computed, total),
            logits_at=logits_at,
            adapter_slots=table.adapter_slots[rows],
            wants_hidden=bool(pooling),
        )
        return PlannedBatch(
            batch=batch,
            indices=indices,
            rows=rows,
            sampling=sampling,
            sampling_rows=sampling_rows,
            places=places,
            states=[table.sampling[row] for row in sampling_rows.tolist()],
            late=late,
            late_places=late_places,
            verifying=verifying,
            drafts=drafts,
            forced=forced,
            pooling=pooling,
            prompts=prompts,
        )

    def _put_forced(self, step: SchedulerOutput, indices: Ints, rows: Ints, sampling: Ints) -> dict[int, list[int]]:
        """Puts forced tokens into the table. Returns them by the place of their request in `sampling`."""
        table, forced = self._table, {}
        for n, i in enumerate(sampling.tolist()):
            tokens = step.forced.get(step.request_ids[indices[i]])
            if tokens:
                forced[n], start = tokens, table.num_tokens[rows[i]]
                table.tokens[rows[i], start : start + len(tokens)] = tokens
        return forced

    def _scored_positions(self, rows: Ints, computed: Ints, total: Ints) -> list[tuple[int, int, int]]:
        """`PlannedBatch.prompts`"""
        table, scored = self._table, []
        for i in np.flatnonzero(table.num_prompt_logprobs[rows] >= 0).tolist():
            first = int(computed[i])
            count = min(int(total[i]), int(table.num_prompt_tokens[rows[i]]) - 1) - first
            if count > 0:
                scored.append((i, first, count))
        return scored


def _tokens(rows: Ints, begins: Ints, computed: Ints, scheduled: Ints) -> tuple[Ints, Ints]:
    """Of each token of a batch: the row of its request, and its position there; both [T]."""
    if begins[-1] == len(rows):
        return rows, computed
    return np.repeat(rows, scheduled), np.arange(begins[-1]) + np.repeat(computed - begins[:-1], scheduled)
