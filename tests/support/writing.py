"""A simulated engine that writes what the test wants."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.engines.contract.messages import SamplingParams, TokenLogprobs
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.engines.simulated.runner import _State


class WritingRunner(SimulatedRunner):
    """Answers each request with the same tokens, the last of them again and again. Each is certain: logprob 0."""

    def __init__(self, config: SimulatedConfig, answer: Sequence[int]) -> None:
        super().__init__(config)
        self.info = msgspec.structs.replace(self.info, supports_logprobs=True)
        self._answer = answer
        self._with_logprobs: set[int] = set()

    def submit(self, step: SchedulerOutput) -> None:
        for request in step.new_requests:
            if isinstance(request.params, SamplingParams) and request.params.logprobs is not None:
                self._with_logprobs.add(request.id)
        super().submit(step)

    def _sample(self, state: _State, digest: int) -> int:
        super()._sample(state, digest)
        number = len(state.token_ids) - 1 - state.num_prompt_tokens
        state.token_ids[-1] = self._answer[min(number, len(self._answer) - 1)]
        return state.token_ids[-1]

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = super()._compute(step)
        for request_id, sampled in zip(step.request_ids, result.sampled_token_ids, strict=True):
            if request_id in self._with_logprobs:
                result.logprobs[request_id] = [TokenLogprobs(token, 0.0, 1, [(token, 0.0)]) for token in sampled]
        return result
