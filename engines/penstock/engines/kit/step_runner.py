"""`StepRunner`: a `ModelRunner` for every model that gives logits. A runner only supplies a `Model`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engines.contract.messages import Grammar
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import TO_BE_DRAFTED, Drafting, ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import EngineError, InvalidRequestError, NumericalError, PenstockError
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.batch import NO_TOKENS, Floats, Model, Outputs
from penstock.engines.kit.draft_model import DraftModel
from penstock.engines.kit.grammars import Grammars
from penstock.engines.kit.planned_step import PlannedBatch, PlannedStep
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.sampling import Sampler, SamplingState, token_logprobs_rows
from penstock.engines.kit.step_planner import StepPlanner

_SCORED_BYTES = 256 << 20
"""Most logits that prompt logprobs may take at a time; longer prompts are computed in several batches."""

_SAMPLING_THREADS = 4
"""At most; they work while the model waits for the tokens."""

_NOT_FINITE = "the model's logits are not finite"
_NOTHING_ALLOWED = "The output cannot be continued: the request allows no token here."


class StepRunner:
    """Keeps the books of a `ModelRunner` and samples; `Model` computes.

    While a step computes, the next one is in a buffer of its own, complete except for the tokens that the first one has
    still to sample. Once they are sampled, they are filled in and the next step starts; only then is the first one's
    answer made.
    """

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        max_num_seqs: int,
        model_dir: Path,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._model = model
        self._draft_model = draft_model
        self._info = info
        # Requests that ended keep their rows until no step under way has them; by then others have their seats.
        num_rows = max_num_seqs * max(2, model.num_buffers)
        self._grammars = Grammars(model_dir, info)
        self._table = RequestTable(info, num_rows, model.adapter_slot, self._grammars)
        self._sampler = Sampler(info.vocab_size, min(usable_cores(), _SAMPLING_THREADS))
        self._planner = StepPlanner(self._table, max_scored=max(1, _SCORED_BYTES // (4 * info.vocab_size)))
        self._under_way: deque[PlannedStep] = deque()
        self._computing: int | None = None
        """The buffer that was started and not yet waited for."""
        self._next_buffer = 0
        self.watch_prompt_logits: Callable[[int, Floats], None] | None = None
        """Called with the id of a request that has `prompt_logprobs`, and the logits [N, vocab] of N of its prompt's
        positions, which come in order. They are valid during the call."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_steps_in_flight(self) -> int:
        return self._model.num_buffers

    def submit(self, step: SchedulerOutput) -> None:
        """`ModelRunner.submit`."""
        self._table.apply(step)
        step, drafting = self._draft(step)
        batches = self._planner.plan(step, is_first=not self._under_way)
        buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % self._model.num_buffers
        if batches:
            self._model.prepare(buffer, batches[0].batch)
        output = ModelRunnerOutput([[] for _ in step.request_ids], drafting=drafting)
        refused = self._table.refused
        if refused:
            output.failed = {i: refused[i] for i in step.request_ids if i in refused}
        self._under_way.append(PlannedStep(step.request_ids, step.block_copies, buffer, batches, output, step.forced))
        if len(self._under_way) == 1:
            self._begin_next()

    def collect(self) -> ModelRunnerOutput:
        """`ModelRunner.collect`."""
        step = self._under_way.popleft()
        if step.failure is not None:
            raise step.failure
        for planned, following in zip_longest(step.batches, step.batches[1:]):
            self._computing = None
            outputs = self._model.wait(step.buffer)
            self._sample(planned, outputs.logits)
            if following is None:
                self._begin_next()
                self._answer(step, planned, outputs)
            else:
                self._answer(step, planned, outputs)
                self._model.prepare(step.buffer, following.batch)
                self._start(step.buffer, following)
        if not step.batches:
            self._begin_next()
        return step.output

    def reset(self) -> None:
        """`ModelRunner.reset`."""
        self._under_way.clear()
        self._table.clear()
        self._planner.reset()
        if self._draft_model is not None:
            self._draft_model.reset()
        if self._computing is not None:
            with contextlib.suppress(Exception):  # the failure that led here was reported already
                self._model.wait(self._computing)
            self._computing = None

    def close(self) -> None:
        """Nothing computes any more; the runner cannot be used afterwards."""
        self.reset()

    def compile_grammar(self, grammar: Grammar) -> Any:
        """`GrammarHost.compile_grammar`."""
        return self._grammars.compile(grammar)

    def is_worn_out(self, compiled: Any) -> bool:
        """`GrammarHost.is_worn_out`."""
        return self._grammars.is_worn_out(compiled)

    # -- before a step computes ------------------------------------------------------------------------------

    def _draft(self, step: SchedulerOutput) -> tuple[SchedulerOutput, Drafting | None]:
        """The step with the draft model's guesses, if it asks for some."""
        if self._draft_model is None:
            return step, None
        self._draft_model.follow(step)
        if not any(TO_BE_DRAFTED in guesses for guesses in step.drafts.values()):
            return step, None
        under_way = {request_id for planned in self._under_way for request_id in planned.request_ids}
        return self._draft_model.guess(step, self._table, under_way)

    def _begin_next(self) -> None:
        """Starts the oldest step under way, if there is one. Its copies may not be made earlier: the steps before may
        have written to their sources."""
        if not self._under_way:
            return
        step = self._under_way[0]
        try:
            if step.copies:
                self._model.copy_blocks(step.copies)
            if step.batches:
                self._start(step.buffer, step.batches[0])
                self._begin_masks(step.batches[0])
        except Exception as error:
            step.failure = error

    def _begin_masks(self, planned: PlannedBatch) -> None:
        """All tokens before those that it samples are known now."""
        for n, tokens in planned.forced.items():
            state = planned.states[n]
            if state is not None:
                for token in tokens:
                    state.append(token)
        if not any(planned.states) and not planned.verifying:
            return
        verifying = [self._table.sampling[row] for row in planned.rows[planned.verifying].tolist()]
        states = [state.grammar for state in (*planned.states, *verifying) if state is not None]
        self._grammars.begin_masks([state for state in states if state is not None])

    def _start(self, buffer: int, planned: PlannedBatch) -> None:
        late = planned.late
        token_ids = self._table.tokens[planned.sampling_rows, planned.late_places] if len(late) else NO_TOKENS
        self._computing = buffer
        self._model.start(buffer, late, token_ids)

    # -- after it has computed -------------------------------------------------------------------------------

    def _sample(self, planned: PlannedBatch, logits: Floats) -> None:
        """Chooses tokens and puts them into the table: all that the next step has to wait for."""
        table, count = self._table, len(planned.sampling)
        if count:
            planned.sampled = sampled = self._sampler.sample(logits[:count], planned.states)
            # A request with -1 fails. A step that follows still needs a valid token in its place.
            table.tokens[planned.sampling_rows, planned.places] = np.maximum(sampled, 0)
            if any(planned.states):
                for state, token in zip(planned.states, sampled.tolist(), strict=True):
                    if state is not None and token >= 0:
                        state.append(token)
        if planned.verifying:
            rows = planned.rows[planned.verifying]
            end = count + len(rows) + sum(map(len, planned.drafts))
            states = [table.sampling[row] for row in rows.tolist()]
            planned.verified = self._sampler.extend(logits[count:end], states, planned.drafts)
            for row, extension in zip(rows.tolist(), planned.verified, strict=True):
                start, tokens = int(table.num_tokens[row]), extension.token_ids
                table.tokens[row, start : start + len(tokens)] = tokens
                table.num_tokens[row] = start + len(tokens)

    def _answer(self, step: PlannedStep, planned: PlannedBatch, outputs: Outputs) -> None:
        """Puts a batch's results into the step's output."""
        logits, start = outputs.logits, len(planned.sampling)
        sampled = planned.sampled.tolist()
        tokens = [[token] if token >= 0 else [] for token in sampled]
        for n, forced in planned.forced.items():
            tokens[n] = [*forced, *tokens[n]]
        self._answer_prompts(step, planned, logits)
        for nth, i in enumerate(planned.sampling.tolist()):
            self._answer_tokens(step, planned, i, tokens[nth], logits[nth : nth + 1], finite=sampled[nth] >= 0)
        self._answer_forced(step, planned)
        for i, guesses, extension in zip(planned.verifying, planned.drafts, planned.verified, strict=True):
            following = logits[start : start + len(extension.token_ids) + (not extension.finite)]
            self._answer_tokens(step, planned, i, extension.token_ids, following, finite=extension.finite)
            start += 1 + len(guesses)
        if planned.pooling:
            self._answer_vectors(step, planned, outputs.hidden, start)

    def _answer_tokens(
        self, step: PlannedStep, planned: PlannedBatch, i: int, token_ids: list[int], logits: Floats, *, finite: bool
    ) -> None:
        """Of request i of the batch: each of `token_ids` was sampled from the row of `logits` at its place. `finite` is
        False where nothing could be sampled from the last row."""
        output, index, state = step.output, planned.indices[i], self._table.sampling[planned.rows[i]]
        request_id = step.request_ids[index]
        if not finite or request_id in output.failed:
            output.failed.setdefault(request_id, _failure(state, logits))
            return
        output.sampled_token_ids[index] = token_ids
        if state is not None and state.params.logprobs is not None:
            output.logprobs[request_id] = token_logprobs_rows(logits, np.array(token_ids), state.params.logprobs)

    def _answer_forced(self, step: PlannedStep, planned: PlannedBatch) -> None:
        """What must follow is looked for since the next step has begun."""
        if not any(planned.states):
            return
        following = self._under_way[0].forced if self._under_way else {}
        for i, state in zip(planned.sampling.tolist(), planned.states, strict=True):
            request_id = step.request_ids[planned.indices[i]]
            # what is part of the next step was told before
            if state is not None and state.grammar is not None and request_id not in following:
                tokens = state.grammar.forced()
                if tokens:
                    step.output.forced[request_id] = tokens

    def _answer_vectors(self, step: PlannedStep, planned: PlannedBatch, hidden: Floats | None, start: int) -> None:
        if hidden is None:
            raise EngineError("the model gave no hidden states")
        for row, i in enumerate(planned.pooling, start):
            request_id, vector = step.request_ids[planned.indices[i]], hidden[row]
            if np.isfinite(vector).all():
                step.output.pooled[request_id] = vector.tolist()
            else:
                step.output.failed.setdefault(request_id, NumericalError(_NOT_FINITE))

    def _answer_prompts(self, step: PlannedStep, planned: PlannedBatch, logits: Floats) -> None:
        table, start = self._table, len(logits) - sum(count for _, _, count in planned.prompts)
        for i, first, count in planned.prompts:
            row, request_id = int(planned.rows[i]), step.request_ids[planned.indices[i]]
            scores, start = logits[start : start + count], start + count
            if not np.isfinite(scores.max(axis=1)).all():
                step.output.failed.setdefault(request_id, NumericalError(_NOT_FINITE))
                continue
            if self.watch_prompt_logits is not None:
                self.watch_prompt_logits(request_id, scores)
            targets = table.tokens[row, first + 1 : first + count + 1].astype(np.int64)
            entries = step.output.prompt_logprobs.setdefault(request_id, [])
            entries += token_logprobs_rows(scores, targets, int(table.num_prompt_logprobs[row]))


def _failure(state: SamplingState | None, logits: Floats) -> PenstockError:
    """Why no token was sampled from these rows; the last of them is the one to blame, if it is known."""
    if state is not None and state.failure is not None:
        return state.failure
    if state is not None and len(logits) and np.isfinite(logits[-1].max()):
        return InvalidRequestError(_NOTHING_ALLOWED, param=state.limits.field if state.limits is not None else None)
    return NumericalError(_NOT_FINITE)
