"""Extra rows of a batch: what it gives beside one sampled token of each request.

Guesses that are verified, tokens that a grammar forces in front of the sampled one, vectors, and logprobs of prompts.
Rows of the logits: one for each request that gets a token; then 1 + len(guesses) for each that verifies some; then one
for each that gets a vector; then the prompt positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import EngineError, NumericalError
from penstock.engines.kit.batch import NO_INTS, Floats, Ints, Outputs
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.sampling import Extension, Sampler, SamplingState, token_logprobs_rows

NOT_FINITE = "the model's logits are not finite"

WatchLogits = Callable[[int, Floats], None]
"""`StepRunner.watch_prompt_logits`"""
PutTokens = Callable[[int, SamplingState | None, list[int], Floats, bool], None]
"""`PlannedStep.put_tokens`"""


class BatchPart(NamedTuple):
    """S requests of a step that are computed together; each array is [S]."""

    indices: Ints
    """Of the requests in the step."""
    rows: Ints
    """Of the request table."""
    computed: Ints
    """How many of their tokens have been computed."""
    scheduled: Ints
    """How many are computed now."""

    def chosen(self, places: Ints) -> BatchPart:
        return BatchPart(*(array[places] for array in self))


@dataclass(slots=True)
class ExtraRows:
    """Requests are named by their place in the batch, if nothing else is said."""

    table: RequestTable
    part: BatchPart
    ids: list[int]
    """Of the requests."""
    sampling: Ints
    """Those that get one token, from the logits of their last one."""
    verifying: list[int]
    """Which requests have guesses."""
    guesses: list[list[int]]
    """Those of each of `verifying`."""
    pooling: list[int]
    """Which requests get a vector."""
    prompts: list[tuple[int, int, int]]
    """(request, first position, count) of prompt positions whose successor is a prompt token."""
    forced: dict[int, list[int]]
    """Tokens that come before the sampled one, by their request's place in `sampling`."""
    verified: list[Extension] = field(default_factory=list)
    """Of each of `verifying`."""

    # -- before the step computes ----------------------------------------------------------------------------

    def logits_at(self, begins: Ints, last_ones: Ints) -> Ints:
        """`Batch.logits_at`; `last_ones`: those of `sampling`."""
        pairs = zip(self.verifying, self.guesses, strict=True)
        spans = [(begins[i + 1], 1 + len(guesses)) for i, guesses in pairs]
        spans += [(begins[i + 1], 1) for i in self.pooling]
        spans += [(begins[i] + first - self.part.computed[i] + count, count) for i, first, count in self.prompts]
        return np.concatenate([last_ones, *(np.arange(end - count, end) for end, count in spans)])

    @property
    def num_forced(self) -> Ints:
        """Of each of `sampling`."""
        return np.array([len(self.forced.get(n, ())) for n in range(len(self.sampling))], np.int64)

    def begin(self, states: list[SamplingState | None]) -> list[SamplingState | None]:
        """The batch starts. `states`: of `sampling`. Returns those of requests that verify."""
        for n, tokens in self.forced.items():
            state = states[n]
            if state is not None:
                for token in tokens:
                    state.append(token)
        return [self.table.sampling[row] for row in self.part.rows[self.verifying].tolist()]

    # -- after it has computed -------------------------------------------------------------------------------

    def verify(self, sampler: Sampler, logits: Floats) -> None:
        """Chooses the tokens of requests that verify and puts them into the table. `logits`: those behind the rows of
        `sampling`."""
        if not self.verifying:
            return
        table, rows = self.table, self.part.rows[self.verifying].tolist()
        end = len(rows) + sum(map(len, self.guesses))
        self.verified = sampler.extend(logits[:end], [table.sampling[row] for row in rows], self.guesses)
        for row, extension in zip(rows, self.verified, strict=True):
            start, tokens = int(table.num_tokens[row]), extension.token_ids
            table.tokens[row, start : start + len(tokens)] = tokens
            table.num_tokens[row] = start + len(tokens)

    def answer(self, output: ModelRunnerOutput, put: PutTokens, outputs: Outputs, watch: WatchLogits | None) -> None:
        """Puts these results into the step's output."""
        self._answer_prompts(output, outputs.logits, watch)
        start = len(self.sampling)
        for i, guesses, extension in zip(self.verifying, self.guesses, self.verified, strict=True):
            tokens = extension.token_ids
            following = outputs.logits[start : start + len(tokens) + (not extension.finite)]
            state = self.table.sampling[self.part.rows[i]]
            put(self.part.indices[i], state, tokens, following, extension.finite)
            start += 1 + len(guesses)
        if self.pooling:
            self._answer_vectors(output, outputs.hidden, start)

    def _answer_vectors(self, output: ModelRunnerOutput, hidden: Floats | None, start: int) -> None:
        if hidden is None:
            raise EngineError("the model gave no hidden states")
        for row, i in enumerate(self.pooling, start):
            if np.isfinite(hidden[row]).all():
                output.pooled[self.ids[i]] = hidden[row].tolist()
            else:
                output.failed.setdefault(self.ids[i], NumericalError(NOT_FINITE))

    def _answer_prompts(self, output: ModelRunnerOutput, logits: Floats, watch: WatchLogits | None) -> None:
        table, start = self.table, len(logits) - sum(count for _, _, count in self.prompts)
        for i, first, count in self.prompts:
            row, request_id = int(self.part.rows[i]), self.ids[i]
            scores, start = logits[start : start + count], start + count
            if not np.isfinite(scores.max(axis=1)).all():
                output.failed.setdefault(request_id, NumericalError(NOT_FINITE))
                continue
            if watch is not None:
                watch(request_id, scores)
            targets = table.tokens[row, first + 1 : first + count + 1].astype(np.int64)
            entries = output.prompt_logprobs.setdefault(request_id, [])
            entries += token_logprobs_rows(scores, targets, int(table.num_prompt_logprobs[row]))


def plan_extra_rows(table: RequestTable, step: SchedulerOutput, part: BatchPart, sampling: Ints) -> ExtraRows:
    """Puts guesses and forced tokens into the table. `sampling`: requests whose last token is computed."""
    ids = [step.request_ids[index] for index in part.indices]
    pooling = sampling[table.pools[part.rows[sampling]]].tolist()
    verifying = [i for i in sampling.tolist() if ids[i] in step.drafts]
    sampling = np.setdiff1d(sampling, pooling + verifying)
    guesses = [step.drafts[ids[i]] for i in verifying]
    for i, tokens in zip(verifying, guesses, strict=True):
        _put(table, int(part.rows[i]), tokens)
    forced = {n: step.forced[ids[i]] for n, i in enumerate(sampling.tolist()) if step.forced.get(ids[i])}
    for n, tokens in forced.items():
        _put(table, int(part.rows[sampling[n]]), tokens)
    prompts = _scored_positions(table, part)
    return ExtraRows(table, part, ids, sampling, verifying, guesses, pooling, prompts, forced)


def _put(table: RequestTable, row: int, tokens: list[int]) -> None:
    """Behind those that are in the table as done."""
    start = table.num_tokens[row]
    table.tokens[row, start : start + len(tokens)] = tokens


def _scored_positions(table: RequestTable, part: BatchPart) -> list[tuple[int, int, int]]:
    """`ExtraRows.prompts`"""
    scored = []
    for i in np.flatnonzero(table.num_prompt_logprobs[part.rows] >= 0).tolist():
        first = int(part.computed[i])
        end = min(first + int(part.scheduled[i]), int(table.num_prompt_tokens[part.rows[i]]) - 1)
        if end > first:
            scored.append((i, first, end - first))
    return scored


def split_scored(table: RequestTable, whole: BatchPart, max_scored: int) -> Iterator[BatchPart]:
    """The batches of a step of which each gives logits of at most `max_scored` prompt positions: prompts with more are
    computed by themselves, in pieces, behind the others."""
    is_scored = (table.num_prompt_logprobs[whole.rows] >= 0) & (
        whole.computed < table.num_prompt_tokens[whole.rows] - 1
    )
    scored = np.flatnonzero(is_scored)
    scored = scored if whole.scheduled[scored].sum() > max_scored else NO_INTS
    unscored = np.setdiff1d(np.arange(len(whole.rows)), scored)
    if len(unscored):
        yield whole.chosen(unscored)
    for i in scored:
        end = int(whole.computed[i] + whole.scheduled[i])
        for start in range(int(whole.computed[i]), end, max_scored):
            count = min(max_scored, end - start)
            yield BatchPart(whole.indices[[i]], whole.rows[[i]], np.array([start]), np.array([count]))
