"""One sample of a request, and what it has put out so far: enough to let another replica go on with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.engines.contract.messages import AddRequest, RequestOutput, SamplingParams


@dataclass(slots=True, eq=False)
class Sample:
    """From the call of its client to its end, wherever it is computed."""

    id: int
    """What its client knows it by."""
    message: AddRequest
    """The request, with all its samples. Its seed is set if tokens are drawn and the request may have to go on
    elsewhere: the random number of a token is a function of the seed and the token's number."""
    index: int
    """Which of the request's samples it is."""
    tokens: list[int] = field(default_factory=list)
    """All that its client has got."""
    _guessed_before: tuple[int, int] = (0, 0)
    _guessed: tuple[int, int] = (0, 0)
    """`RequestOutput.guessed`, as its client knows it."""
    num_deaths: int = 0
    """How many replicas in a row have died with it, and no token between."""
    fingerprint: str = ""
    """Of the engine that its tokens are from: only one with the same may go on behind them."""

    def take(self, output: RequestOutput) -> RequestOutput:
        """The same output under the client's id, with counts that go on where an earlier replica's ended."""
        output.id = self.id
        if output.token_ids:
            self.tokens += output.token_ids
            self.num_deaths = 0
        if output.guessed is not None:
            (right, wrong), before = output.guessed, self._guessed_before
            output.guessed = self._guessed = before[0] + right, before[1] + wrong
        return output

    def moves(self) -> None:
        """Its replica is lost: the next one counts from 0."""
        self._guessed_before = self._guessed

    def rest(self, request_id: int) -> AddRequest:
        """The request for what is missing of it. As the tokens so far are its output and not its prompt, limits,
        penalties, grammars and random numbers are what they would have been."""
        message, params = self.message, self.message.params
        if isinstance(params, SamplingParams):
            seed = None if params.seed is None else params.seed + self.index
            is_told = self.index > 0 or bool(self.tokens)  # of its prompt's logprobs
            params = msgspec.structs.replace(
                params, seed=seed, prompt_logprobs=None if is_told else params.prompt_logprobs
            )
        return msgspec.structs.replace(
            message, ids=(request_id,), params=params, output_token_ids=list(self.tokens), session=""
        )


def is_untouched(samples: Sequence[Sample]) -> bool:
    """Whether these are all samples of their request, and none has put out a token: they can be sent as they were."""
    return len(samples) == len(samples[0].message.ids) and not any(sample.tokens for sample in samples)
