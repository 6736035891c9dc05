"""What a draft head of the openvino runner is asked, and engines that ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.engines.contract.step import TO_BE_DRAFTED, Drafting, SchedulerOutput
from penstock.engines.core import EngineCore
from penstock.engines.kit.batch import Outputs
from penstock.engines.kit.request_table import RequestTable
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.request import Run
from penstock.engines.scheduler.speculation import Worth
from support.draft_heads import HeadReference
from support.engine import Driver as Core
from support.runner import prompt


class Watch:
    """What a runner's head is asked, and the logits of its guesses."""

    def __init__(self, runner: OpenVINORunner) -> None:
        draft = runner._draft_model
        assert draft is not None
        draft._clock = lambda: 0.0
        self.asked: list[tuple[list[int], list[int], list[Any]]] = []
        """Known tokens of a request, its guesses, and their logits."""
        guess, wait = draft.guess, draft._model.wait
        passes: list[Any] = []

        def watched_wait(buffer: int) -> Outputs:
            outputs = wait(buffer)
            passes.append(outputs.logits.copy())
            return outputs

        def watched_guess(step: SchedulerOutput, table: RequestTable, *rest: Any) -> tuple[SchedulerOutput, Drafting]:
            passes.clear()
            made, drafting = guess(step, table, *rest)
            counts = {request_id: count for request_id, count in drafting.num_guesses.items() if count}
            logits: dict[int, list[Any]] = {request_id: [] for request_id in counts}
            for number, rows in enumerate(passes):
                for request_id, row in zip([i for i, count in counts.items() if count > number], rows, strict=True):
                    logits[request_id].append(row)
            for request_id in counts:
                place = step.num_computed_tokens[step.request_ids.index(request_id)]
                known = table.tokens[table.rows_of([request_id])[0], : place + 1].tolist()
                self.asked.append((known, made.drafts[request_id], logits[request_id]))
            return made, drafting

        draft.guess, draft._model.wait = watched_guess, watched_wait  # type: ignore[method-assign]


def check_guesses(watch: Watch, reference: HeadReference, token_ids: Sequence[int] | None = None) -> None:
    """They are those of the published forward. `token_ids`: of the head's vocabulary; None: that of the model."""
    for known, guesses, logits in watch.asked:
        wanted = reference.logits(known, guesses[:-1]).numpy()
        np.testing.assert_allclose(np.stack(logits), wanted, atol=2e-3)
        likeliest = wanted.argmax(1).tolist()
        assert guesses == (likeliest if token_ids is None else [token_ids[number] for number in likeliest])


def guess_always(core: Core, count: int = 3) -> None:
    """However often guesses were wrong."""
    assert isinstance(core.core, EngineCore)
    speculation = core.core.scheduler.speculation

    def guesses(run: Run, room: int, worth: Worth) -> list[int]:
        guesser = speculation._guesser_of(run.request)  # it counts which were right
        limit = min(room, count, run.request.max_num_tokens - run.request.num_tokens - 1)
        return [] if worth.prompt_tokens or guesser is None else [TO_BE_DRAFTED] * limit

    speculation.guesses = guesses  # type: ignore[method-assign]


def run(runner: OpenVINORunner, speculative: str, depth: int) -> tuple[list[list[int]], Any]:
    """Greedy, sampled and several of one prompt, with preemption and prefix hits."""
    assert runner._draft_model is not None
    runner._draft_model._clock = lambda: 0.0
    core = Core(runner, max_num_seqs=8, max_num_batched_tokens=48, steps_in_flight=depth, speculative=speculative)
    first = core.add(prompt(70, 1), 30)
    core.run()
    ids = [*first, *core.add(prompt(70, 1), 40, 2, temperature=1.0, seed=7), *core.add(prompt(40, 2), 40, logprobs=1)]
    ids += [*core.add(prompt(66, 3), 40, temperature=0.7, seed=3), *core.add([5], 50)]
    core.run()
    return [core.tokens[i] for i in ids], core.stats
