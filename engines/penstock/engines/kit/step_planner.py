"""Plans of steps: what a model has to compute for one, as arrays, from the scheduler's decisions and the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import InvalidRequestError, NumericalError, PenstockError
from penstock.engines.kit.batch import NO_INTS, NOTHING, Floats, Ints, StepBatch
from penstock.engines.kit.extra_rows import NOT_FINITE, BatchPart, ExtraRows, plan_extra_rows, split_scored
from penstock.engines.kit.guess_states import GuessStates
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.sampling import SamplingState, token_logprobs_rows

_NOTHING_ALLOWED = "The output cannot be continued: the request allows no token here."


@dataclass(slots=True)
class PlannedBatch:
    """A batch, and what its outputs are for."""

    batch: StepBatch
    indices: Ints
    """[S]: of its requests in the step."""
    rows: Ints
    """[S]: of the request table."""
    sampling: Ints
    """[n]: which of its requests get one token, from the logits of their last one: the first n rows of the logits."""
    sampling_rows: Ints
    """[n]: of the request table."""
    places: Ints
    """[n]: the position of that token."""
    states: list[SamplingState | None]
    """[n]"""
    late: Ints
    """[L]: indices of the tokens that a step under way may still have to sample; either one of every request in
    `sampling`, or none."""
    late_places: Ints
    """[L]: the positions of those tokens."""
    extra: ExtraRows | None = None
    """What it gives besides; None: nothing."""
    sampled: Ints = field(default_factory=lambda: NO_INTS)
    """[n]: -1 where the logits are not finite."""

    @property
    def only_decodes(self) -> bool:
        """Each request of the step gets its next token, and nothing else is computed."""
        return len(self.sampling) == len(self.indices) == len(self.batch.positions)


@dataclass(slots=True)
class PlannedStep:
    """A step from its planning to its answer."""

    request_ids: list[int]
    copies: list[tuple[int, int]]
    buffer: int
    batches: list[PlannedBatch]
    """Computed one after the other, in the same buffer. The first is prepared when the step is submitted."""
    output: ModelRunnerOutput
    forced: dict[int, list[int]]
    """`SchedulerOutput.forced`"""
    failure: Exception | None = None
    """It could not be begun, which is told when it is collected: another step's result may be there first."""

    def put_tokens(
        self,
        index: int,
        state: SamplingState | None,
        token_ids: list[int],
        logits: Floats,
        finite: bool,
    ) -> None:
        """Of request `index` of the step: each of `token_ids` was sampled from the row of `logits` at its place.
        `finite` is False where nothing could be sampled from the last row."""
        output = self.output
        request_id = self.request_ids[index]
        if not finite or request_id in output.failed:
            output.failed.setdefault(request_id, _failure(state, logits))
            return
        output.sampled_token_ids[index] = token_ids
        if state is not None and state.params.logprobs is not None:
            output.logprobs[request_id] = token_logprobs_rows(logits, np.array(token_ids), state.params.logprobs)


def _failure(state: SamplingState | None, logits: Floats) -> PenstockError:
    """Why no token was sampled from these rows; the last of them is the one to blame, if it is known."""
    if state is not None and state.failure is not None:
        return state.failure
    if state is not None and len(logits) and np.isfinite(logits[-1].max()):
        return InvalidRequestError(_NOTHING_ALLOWED, param=state.limits.field if state.limits is not None else None)
    return NumericalError(NOT_FINITE)


class StepPlanner:
    """Reads the table, and writes into it what is known of a step before it computes: guesses, forced tokens, and how
    many tokens its requests will have."""

    def __init__(self, table: RequestTable, max_scored: int, guess_states: GuessStates | None = None) -> None:
        """`max_scored`: positions of prompts whose logits may be in one batch; `guess_states`: of a model with
        recurrent layers."""
        self._table = table
        self._max_scored = max_scored
        self._guess_states = guess_states
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
        batch = StepBatch(
            token_ids=table.tokens[last.rows, positions],
            positions=positions,
            begins=last.batch.begins,
            computed=positions,
            scheduled=last.batch.scheduled,
            groups=groups,
            logits_at=last.batch.logits_at,
            adapter_slots=last.batch.adapter_slots,
            wants_hidden=False,
            grid_positions=_grid_positions(table, last.rows, last.batch.begins, positions) if table.grids else None,
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
        )

    def _plan(self, step: SchedulerOutput, is_first: bool) -> Iterator[PlannedBatch]:
        table = self._table
        if not step.request_ids:
            return
        rows = table.rows_of(step.request_ids)
        computed = np.array(step.num_computed_tokens, np.int64)
        part = BatchPart(np.arange(len(rows)), rows, computed, np.array(step.num_scheduled_tokens, np.int64))
        if table.refused:
            part = part.chosen(np.flatnonzero([i not in table.refused for i in step.request_ids]))
        if not table.special:
            if len(part.rows):
                yield self._batch(step, is_first, part)
            return
        for piece in split_scored(table, part, self._max_scored):
            yield self._batch(step, is_first, piece)

    def _batch(self, step: SchedulerOutput, is_first: bool, part: BatchPart) -> PlannedBatch:
        table, (indices, rows, computed, scheduled) = self._table, part
        total, num_tokens = computed + scheduled, table.num_tokens[rows]
        begins = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(scheduled, out=begins[1:])
        sampling = np.flatnonzero(total >= num_tokens)
        extra = None
        if step.drafts or step.forced or table.special:
            extra = plan_extra_rows(table, step, part, sampling)
            sampling = extra.sampling
        last_ones = begins[1:][sampling] - 1
        late, places, sampling_rows = NO_INTS if is_first else last_ones, num_tokens[sampling], rows[sampling]
        late_places = places - 1
        if extra is not None and extra.forced:
            counts = extra.num_forced
            late, places = late - counts if len(late) else late, places + counts
        table.num_tokens[sampling_rows] = places + 1
        owners, positions = _tokens(rows, begins, computed, scheduled)
        reads, writes = NOTHING, NOTHING
        if self._guess_states is not None:
            reads, writes = self._guess_states.take([step.request_ids[i] for i in indices.tolist()], step.drafts)
        batch = StepBatch(
            token_ids=table.tokens[owners, positions],
            positions=positions,
            begins=begins,
            computed=computed,
            scheduled=scheduled,
            groups=table.group_tables(rows, computed, total),
            logits_at=last_ones if extra is None else extra.logits_at(begins, last_ones),
            adapter_slots=table.adapter_slots[rows],
            wants_hidden=extra is not None and bool(extra.pooling),
            state_reads=reads,
            state_writes=writes,
            grid_positions=_grid_positions(table, rows, begins, positions) if table.grids else None,
            embeddings=_embeddings(table, part, begins) if table.embeddings else None,
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
            extra=extra,
        )


def _grid_positions(table: RequestTable, rows: Ints, begins: Ints, positions: Ints) -> Ints:
    """`StepBatch.grid_positions`"""
    turned = np.repeat(positions[:, None], 3, axis=1)
    for row, begin, end in zip(rows.tolist(), begins.tolist(), begins[1:].tolist(), strict=False):
        grid = table.grids.get(row)
        if grid is not None:
            turned[begin:end] = grid.between(int(positions[begin]), int(positions[end - 1]) + 1)
    return turned


def _embeddings(table: RequestTable, part: BatchPart, begins: Ints) -> tuple[Ints, Floats] | None:
    """`StepBatch.embeddings`"""
    places: list[Ints] = []
    values: list[Floats] = []
    for begin, row, computed, scheduled in zip(
        begins.tolist(), part.rows.tolist(), part.computed.tolist(), part.scheduled.tolist(), strict=False
    ):
        for start, rows in table.embeddings.get(row, ()):
            first, stop = max(start, computed), min(start + len(rows), computed + scheduled)
            if first < stop:
                places.append(np.arange(first, stop) + (begin - computed))
                values.append(rows[first - start : stop - start])
    return (np.concatenate(places), np.concatenate(values)) if places else None


def _tokens(rows: Ints, begins: Ints, computed: Ints, scheduled: Ints) -> tuple[Ints, Ints]:
    """Of each token of a batch: the row of its request, and its position there; both [T]."""
    if begins[-1] == len(rows):
        return rows, computed
    return np.repeat(rows, scheduled), np.arange(begins[-1]) + np.repeat(computed - begins[:-1], scheduled)
