"""From the logits of a step to what the runner answers: sampled tokens, their logprobs, those of prompts, failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.step import ModelRunnerOutput
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.kit.sampling import Sampler, token_logprobs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_SCORED_BYTES = 256 << 20
"""Most logits that prompt logprobs may take at a time; longer prompts are computed in several inferences."""

_NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of a step that are computed together; arrays are [S], in their order."""

    indices: Ints
    """Of these requests in the step."""
    rows: Ints
    """Of the request table."""
    computed: Ints
    scheduled: Ints


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose logits a part needs: those that are sampled from, then those of prompt positions."""

    sampling: Ints
    """Which of the part's requests get a new token, from the logits of their last token."""
    prompts: list[tuple[int, int, int]]
    """(index of the request, first position, count) of prompt positions whose successor is a prompt token."""

    def offsets(self, part: Part, begins: Ints) -> Ints:
        """Indices of the wanted tokens, where request i's tokens begin at begins[i]."""
        last = begins[self.sampling] + part.scheduled[self.sampling] - 1
        scored = [begins[i] + first - part.computed[i] + np.arange(count) for i, first, count in self.prompts]
        return np.concatenate([last, *scored])


class StepSampler:
    """Samples for the requests of a table, and fills in ModelRunnerOutput."""

    def __init__(self, table: RequestTable, vocab_size: int) -> None:
        self._table = table
        self._sampler = Sampler(vocab_size)
        self._max_scored = max(1, _SCORED_BYTES // (4 * vocab_size))

    def parts(self, rows: Ints, computed: Ints, scheduled: Ints) -> Iterator[Part]:
        """What is to be computed one after the other.

        That is all at once, unless prompt logprobs ask for more logits than memory should be spent on: those prompts
        are then computed by themselves, in chunks.
        """
        scored = self._table.wants_prompt_logprobs[rows]
        every = np.arange(len(rows))
        if not scored.any() or scheduled[scored].sum() <= self._max_scored:
            yield Part(every, rows, computed, scheduled)
            return
        others = every[~scored]
        if len(others):
            yield Part(others, rows[others], computed[others], scheduled[others])
        for i in every[scored]:
            for start in range(0, int(scheduled[i]), self._max_scored):
                count = min(self._max_scored, int(scheduled[i]) - start)
                yield Part(every[i : i + 1], rows[i : i + 1], computed[i : i + 1] + start, np.array([count]))

    def wanted(self, part: Part) -> Wanted:
        table, total = self._table, part.computed + part.scheduled
        prompts: list[tuple[int, int, int]] = []
        for i in np.flatnonzero(table.wants_prompt_logprobs[part.rows]).tolist():
            first = int(part.computed[i])
            count = min(int(total[i]), int(table.num_prompt_tokens[part.rows[i]]) - 1) - first
            if count > 0:
                prompts.append((i, first, count))
        return Wanted(np.flatnonzero(total == table.num_tokens[part.rows]), prompts)

    def take(self, ids: list[int], part: Part, wanted: Wanted, logits: Floats, output: ModelRunnerOutput) -> None:
        """`ids` of all of the step's requests; `logits` [N, vocab] in the order of `Wanted`."""
        self._score_prompts(ids, part, wanted, logits[len(wanted.sampling) :], output)
        if len(wanted.sampling):
            self._sample(ids, part, wanted.sampling, logits[: len(wanted.sampling)], output)

    def _sample(self, ids: list[int], part: Part, sampling: Ints, logits: Floats, output: ModelRunnerOutput) -> None:
        rows, indices = part.rows[sampling], part.indices[sampling].tolist()
        result = self._sampler.sample(logits, [self._table.sampling[row] for row in rows.tolist()])
        for n, (index, token_id) in enumerate(zip(indices, result.token_ids.tolist(), strict=True)):
            if token_id < 0 or ids[index] in output.failed:
                output.failed.setdefault(ids[index], _NOT_FINITE)
                result.token_ids[n] = -1
            else:
                output.sampled_token_ids[index].append(token_id)
        good = result.token_ids >= 0
        self._table.append(rows[good], result.token_ids[good])
        for n, entry in result.logprobs.items():
            output.logprobs[ids[indices[n]]] = [entry]

    def _score_prompts(
        self, ids: list[int], part: Part, wanted: Wanted, logits: Floats, output: ModelRunnerOutput
    ) -> None:
        table, start = self._table, 0
        for i, first, count in wanted.prompts:
            row, request_id = int(part.rows[i]), ids[part.indices[i]]
            scores, start = logits[start : start + count], start + count
            if not np.isfinite(scores.max(axis=1)).all():
                output.failed.setdefault(request_id, _NOT_FINITE)
                continue
            targets = table.tokens[row, first + 1 : first + count + 1].tolist()
            entries = output.prompt_logprobs.setdefault(request_id, [])
            top = int(table.num_prompt_logprobs[row])
            entries += [token_logprobs(scores[n], target, top) for n, target in enumerate(targets)]
