"""Tokens ahead of a request's newest one: guesses that a step verifies, and tokens that a grammar forces.

Guesses are verified by the model, several in one step (Leviathan et al., arXiv:2211.17192).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from penstock.engines.contract.messages import RequestOutput, SamplingParams
from penstock.engines.contract.step import Drafting, ModelRunnerOutput, SchedulerOutput
from penstock.engines.scheduler.budget import Pace, StepBudget, StepPlan
from penstock.engines.scheduler.guessers import (
    MAX_VOCAB_SIZE,
    DraftModelGuesses,
    Guesser,
    PredictedOutput,
    PromptLookup,
)
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.request import Request, Run
from penstock.engines.scheduler.running import RunningRequests, StepUnderWay

_LEAST_GAIN = 2.0
"""What a forced token or a guess of the draft model saves, in parts of what it takes. Such a guess costs more than its
own time: the draft model has to catch up with the request first, and steps are not prepared while others compute."""
_MOST_DRAFTED = 8
"""With more requests that generate, the draft model makes no guesses. A guess needs logits to be verified, which the
tokens of prompts do not, and steps are measured by both. With 16 requests of a 494 M model guesses that were nearly all
right took a tenth to a fifth of the speed away."""


class Worth(NamedTuple):
    """What guesses are worth in a step."""

    right_saves: float
    """Seconds that a right guess saves: one request's part of the time that those that generate take."""
    draft_seconds: float
    """What a guess of the draft model takes: one request's part of a forward pass for those that generate."""
    prompt_tokens: int
    """What the step gives to prompts."""


_NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})
_UNKNOWN = Worth(0.0, 0.0, 0)


class Speculation:
    """Puts guesses and forced tokens into steps, and learns from the results. Nothing of it is called while no request
    `looks_ahead`."""

    def __init__(self, intake: QueueIntake, running: RunningRequests, budget: StepBudget) -> None:
        self.draft_pace = Pace()
        """Of the draft model's forward passes, by their tokens alone."""
        self._config = config = intake.config
        self._intake = intake
        self._running = running
        self._budget = budget
        fits = intake.info.vocab_size <= MAX_VOCAB_SIZE
        self.guesses_for_all = config.speculative == "draft_model" or (config.speculative == "ngram" and fits)
        """Every request gets guesses; else those with predictions only."""
        self.in_use = self.guesses_for_all
        """Some request looks ahead."""
        self._predicted: set[int] = set()
        """Ids of requests with predictions; ended ones are removed at the next step."""
        self._bound: set[int] = set()
        """The same of those with a grammar."""
        self._worth = _UNKNOWN
        """Of the newest step: it counts until the next one is planned."""
        self._states = intake.info.states
        self._guess_states = intake.info.guess_states
        self._beside: dict[Run, int] = {}
        """Requests whose last guesses were not all right, with the number of the step that has verified them: up to
        the end of the next one their states are where those of guesses are."""
        self._awaited: Run | None = None
        """The request for whose guesses the next step was held back."""

    def follow(self, samples: Iterable[Request]) -> None:
        """These new requests look ahead."""
        for request in samples:
            request.looks_ahead = True
            if request.grammar is not None:
                self._bound.add(request.id)
            if request.params.prediction:
                self._predicted.add(request.id)
                request.guesser = PredictedOutput(request.params.prediction, self._config.max_draft_tokens)
                request.guesser.append(request.token_ids[request.num_prompt_tokens :])
        self.in_use = True

    # -- a step ----------------------------------------------------------------------------------------------

    def holds_back(self, ready: Iterable[Run], newest: StepUnderWay) -> bool:
        """Whether some request has guesses, for which its newest token has to be known. `newest`: of the steps under
        way.

        While guesses are verified, one step is under way at a time. Otherwise requests that verify and others would
        take turns, in steps that each read all of the weights.
        """
        if not self._guesses_some:
            return False
        if newest.step.drafts:
            return True
        for run in ready:
            waits_for_token = run.num_computed_tokens + 1 >= run.request.num_tokens
            room = self._room(self._config.max_num_batched_tokens, run.num_computed_tokens, newest.number + 1)
            if waits_for_token and run.request.looks_ahead and self.guesses(run, room, self._worth):
                self._awaited = run
                return True
        return False

    def extend(self, new: StepUnderWay, plan: StepPlan) -> None:
        """Adds guesses to verify or forced tokens to those requests of the step that get one token by its plan."""
        self._forget_ended()
        awaited, self._awaited = self._awaited, None
        if not self._guesses_some and not any(run.forced for run in new.runs):
            return
        self._worth = self._weigh(new, plan)
        step, num_ready = new.step, len(new.runs)
        room = self._config.max_num_batched_tokens - sum(step.num_scheduled_tokens)
        for index, run in enumerate(new.runs):
            if run.id in plan.shares or not run.request.looks_ahead:
                continue
            num_pending = max(0, step.num_computed_tokens[index] + 1 - run.request.num_tokens)
            ahead = self._forced(run, num_pending, room, num_ready) if run.forced else ()
            if ahead and self._running.grow(run, len(ahead), step):
                step.forced[run.id] = list(ahead)
            else:
                room_for_guesses = self._room(room, step.num_computed_tokens[index], new.number, step.drafts)
                ahead = [] if num_pending else self.guesses(run, room_for_guesses, self._worth)
                if run is awaited and not ahead and run.request.guesser is not None:
                    run.request.guesser.missed()
                if not ahead or not self._running.grow(run, len(ahead), step):
                    continue
                step.drafts[run.id] = list(ahead)
                run.verifies = True
            room -= len(ahead)
            new.add(index, len(ahead))

    @property
    def _guesses_some(self) -> bool:
        return self.guesses_for_all or bool(self._predicted)

    def _forget_ended(self) -> None:
        self._predicted &= self._intake.requests.keys()
        self._bound &= self._intake.requests.keys()
        self.in_use = self._guesses_some or bool(self._bound)
        if not self.in_use:
            self._worth = _UNKNOWN

    def _weigh(self, new: StepUnderWay, plan: StepPlan) -> Worth:
        starts = zip(new.runs, new.step.num_computed_tokens, strict=True)
        singles = [start for run, start in starts if run.id not in plan.shares]
        seconds = self._budget.pace.seconds(len(singles), sum(singles))
        num_generating = sum([r.request.num_tokens > r.request.num_prompt_tokens for r in self._running.runs])
        return Worth(seconds / max(1, num_generating), self._draft_seconds(num_generating), plan.prompt_tokens)

    def _draft_seconds(self, num_generating: int) -> float:
        """`Worth.draft_seconds`"""
        if num_generating > _MOST_DRAFTED:
            return math.inf
        return self.draft_pace.seconds(num_generating, 0.0) / max(1, num_generating)

    def _room(self, room: int, position: int, number: int, drafts: Mapping[int, Sequence[int]] = _NO_DRAFTS) -> int:
        """How many guesses, at most `room`, can follow the token at `position` in step `number`, which has `drafts`
        already. Those of one request go as far as a row of states does: so a checkpoint is never among them."""
        if self._states is None:
            return room
        self._beside = {run: n for run, n in self._beside.items() if run.has_seat and run.last_step in (n, number)}
        left = self._guess_states - len(self._beside) - sum(map(len, drafts.values()))
        return max(0, min(room, left, -(position + 1) % self._states.table.block_size))

    def guesses(self, run: Run, room: int, worth: Worth) -> list[int]:
        """Tokens to verify beside the request's next one, at most `room`. `worth`: of the step, or of the newest one.

        A guess is worth its time if the time that it takes, to make and to verify, is less than what it saves, with the
        probability that it and all before it are right. So there are fewer as the batch grows. The draft model makes
        none while prompts are computed: they would wait for it, and the batch is about to grow.
        """
        request, guesser = run.request, self._guesser_of(run.request)
        if guesser is None:
            return []
        limit = min(room, request.max_num_tokens - request.num_tokens - 1, self._config.max_draft_tokens)
        cost = self._budget.pace.seconds_per_token(run.num_computed_tokens)
        if guesser.uses_draft_model:
            if worth.prompt_tokens:
                return []
            cost = _LEAST_GAIN * (cost + worth.draft_seconds)
        chance, count = guesser.acceptance, 0
        while count < limit and chance * worth.right_saves >= cost:
            count += 1
            chance *= guesser.acceptance
        return guesser.guess(count)

    def _guesser_of(self, request: Request) -> Guesser | None:
        """Made when a request may have guesses for the first time: those that wait need none. A draft model counts
        positions as text has them, so it has none for images whose tokens lie in a grid, nor for the text behind."""
        in_grid = request.images is not None and self._intake.info.has_grid_positions
        if in_grid and self._config.speculative == "draft_model":
            return request.guesser
        if request.guesser is None and self.guesses_for_all and request.pooling is None:
            if self._config.speculative == "draft_model":
                request.guesser = DraftModelGuesses(self._config.max_draft_tokens)
            else:
                request.guesser = PromptLookup(request.token_ids, self._config.max_draft_tokens)
        return request.guesser

    def _forced(self, run: Run, num_pending: int, room: int, num_ready: int) -> Sequence[int]:
        """Tokens to compute beside the request's next one, at most `room`, that its grammar leaves no choice about.
        `num_pending`: tokens that steps under way will add; `num_ready`: how many requests this step has."""
        request = run.request
        limit = min(room, request.max_num_tokens - request.num_tokens - num_pending - 1, self._budget.chunk - 1)
        tokens = run.forced[num_pending : num_pending + max(0, limit)]
        return tokens if tokens and _may_jump(request.params) and self._jump_pays(run, num_ready) else ()

    def _jump_pays(self, run: Run, num_ready: int) -> bool:
        """Computed in a step of its own, a token takes a part of the step's fixed time as well. In large batches on a
        CPU that is little, and steps in which each request gets one token are planned faster."""
        pace = self._budget.pace
        cost = pace.seconds_per_token(run.num_computed_tokens)
        return pace.seconds(0, 0.0) >= _LEAST_GAIN * num_ready * cost

    # -- its result ------------------------------------------------------------------------------------------

    def take_in(self, done: StepUnderWay, index: int, output: RequestOutput, result: ModelRunnerOutput) -> int:
        """Of request `index` of a step, which got `output`: learns how good its guesses were, and takes note of what
        its grammar forces next. Returns up to where its known tokens are computed."""
        run, step, sampled = done.runs[index], done.step, result.sampled_token_ids[index]
        request, start = run.request, step.num_computed_tokens[index]
        computed, num_guessed = start + step.num_scheduled_tokens[index], 0
        if request.grammar is not None and self._config.jump_ahead:
            run.forced = result.forced.get(request.id, ())
        if request.id in step.drafts:
            computed = run.verified(start, len(sampled))
            drafted = None if result.drafting is None else result.drafting.num_guesses.get(request.id)
            num_guessed = len(step.drafts[request.id]) if drafted is None else drafted
            if self._states is not None and len(sampled) <= num_guessed:
                self._beside[run] = done.number
            if num_guessed:
                self._intake.stats.draft_tokens += num_guessed
                self._intake.stats.accepted_tokens += len(sampled) - 1
        elif request.id in step.forced:
            computed = min(computed, request.num_tokens)
            self._intake.stats.forced_tokens += len(output.token_ids) - 1
        if request.guesser is not None:
            _learn(request.guesser, output, num_guessed, len(sampled) - 1)
        return computed

    def without_drafting(self, step: SchedulerOutput, drafting: Drafting, seconds: float) -> tuple[int, float]:
        """Tokens and seconds of a step that took so long, without those of the draft model."""
        num_tokens = step.total_num_scheduled_tokens
        num_tokens -= sum(len(step.drafts[i]) - drafted for i, drafted in drafting.num_guesses.items())
        for num_drafted, taken in drafting.passes:
            self.draft_pace.observe(num_drafted, 0.0, taken)
            seconds -= taken
        return num_tokens, max(0.0, seconds)


def _learn(guesser: Guesser, output: RequestOutput, num_guessed: int, num_right: int) -> None:
    """Tells `guesser` a request's new tokens, and how many of its guesses, if it had any, were right."""
    guesser.append(output.token_ids)
    if num_guessed:
        guesser.verified(num_guessed, num_right)
    if isinstance(guesser, PredictedOutput):
        output.guessed = (guesser.num_right, guesser.num_wrong)


def _may_jump(params: SamplingParams) -> bool:
    """Whether forced tokens may go without being sampled: their logprobs are not asked for, and nothing but the grammar
    could forbid one of them."""
    limited = params.allowed_token_ids is not None or params.bad_words or params.processors or params.min_tokens
    return params.logprobs is None and not limited
