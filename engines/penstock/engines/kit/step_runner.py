"""The `ModelRunner` for every model that gives logits. A runner only supplies a `Model`."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engines.contract.messages import Grammar
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.batch import NO_TOKENS, Floats, Model, Outputs
from penstock.engines.kit.draft_model import DraftModel
from penstock.engines.kit.extra_rows import WatchLogits
from penstock.engines.kit.grammars import Grammars
from penstock.engines.kit.guess_states import GuessStates
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.sampling import Sampler
from penstock.engines.kit.sampling.plain import largest
from penstock.engines.kit.step_planner import PlannedBatch, PlannedStep, StepPlanner

_SCORED_BYTES = 256 << 20
"""Most logits that prompt logprobs may take at a time; longer prompts are computed in several batches."""

_SAMPLING_THREADS = 4
"""At most; they work while the model waits for the tokens."""


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
        self._guess_states = GuessStates(info) if info.guess_states else None
        max_scored = max(1, _SCORED_BYTES // (4 * info.vocab_size))
        self._planner = StepPlanner(self._table, max_scored, self._guess_states)
        self._under_way: deque[PlannedStep] = deque()
        self._computing: int | None = None
        """The buffer that was started and not yet waited for."""
        self._next_buffer = 0
        self.watch_prompt_logits: WatchLogits | None = None
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
        if self._guess_states is not None:
            self._guess_states.forget(step)
        drafting = None
        if self._draft_model is not None:
            under_way = {request_id for planned in self._under_way for request_id in planned.request_ids}
            step, drafting = self._draft_model.complete(step, self._table, under_way)
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
        if self._guess_states is not None:
            self._guess_states.verified(step.request_ids, step.output)
        return step.output

    def reset(self) -> None:
        """`ModelRunner.reset`."""
        self._under_way.clear()
        self._table.clear()
        self._planner.reset()
        if self._guess_states is not None:
            self._guess_states.reset()
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
        states = planned.states if planned.extra is None else [*planned.states, *planned.extra.begin(planned.states)]
        if any(states):
            grammars = [state.grammar for state in states if state is not None]
            self._grammars.begin_masks([grammar for grammar in grammars if grammar is not None])

    def _start(self, buffer: int, planned: PlannedBatch) -> None:
        late = planned.late
        token_ids = self._table.tokens[planned.sampling_rows, planned.late_places] if len(late) else NO_TOKENS
        self._computing = buffer
        self._model.start(buffer, late, token_ids)

    # -- after it has computed -------------------------------------------------------------------------------

    def _sample(self, planned: PlannedBatch, logits: Floats) -> None:
        """Chooses tokens and puts them into the table: all that the next step has to wait for."""
        count = len(planned.sampling)
        if count:
            plain = not any(planned.states)
            planned.sampled = largest(logits[:count]) if plain else self._sampler.sample(logits[:count], planned.states)
            sampled = planned.sampled
            # A request with -1 fails. A step that follows still needs a valid token in its place.
            self._table.tokens[planned.sampling_rows, planned.places] = np.maximum(sampled, 0)
            if not plain:
                for state, token in zip(planned.states, sampled.tolist(), strict=True):
                    if state is not None and token >= 0:
                        state.append(token)
        if planned.extra is not None:
            planned.extra.verify(self._sampler, logits[count:])

    def _answer(self, step: PlannedStep, planned: PlannedBatch, outputs: Outputs) -> None:
        """Puts a batch's results into the step's output."""
        logits, sampled = outputs.logits, planned.sampled.tolist()
        tokens = [[token] if token >= 0 else [] for token in sampled]
        if planned.extra is not None:
            planned.extra.answer(step.output, step.put_tokens, outputs, self.watch_prompt_logits)
            for n, forced in planned.extra.forced.items():
                tokens[n] = [*forced, *tokens[n]]
        for n, index in enumerate(planned.indices[planned.sampling].tolist()):
            step.put_tokens(index, planned.states[n], tokens[n], logits[n : n + 1], sampled[n] >= 0)
        if any(planned.states):
            self._answer_forced(step, planned)

    def _answer_forced(self, step: PlannedStep, planned: PlannedBatch) -> None:
        """What must follow is looked for since the next step has begun."""
        following = self._under_way[0].forced if self._under_way else {}
        for i, state in zip(planned.sampling.tolist(), planned.states, strict=True):
            request_id = step.request_ids[planned.indices[i]]
            # what is part of the next step was told before
            if state is not None and state.grammar is not None and request_id not in following:
                tokens = state.grammar.forced()
                if tokens:
                    step.output.forced[request_id] = tokens
