"""What sampling has to remember of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.kit.sampling.penalties import TokenCounts
from penstock.engines.kit.sampling.uniform import stream_key

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them leaves nothing but the largest logit."""


@dataclass(slots=True)
class SamplingState:
    """A request whose next token is more than the largest logit, or that wants logprobs."""

    params: SamplingParams
    key: int
    """Of its sequence of random numbers."""
    num_output_tokens: int
    greedy: bool
    truncated: bool
    """top_k, min_p or top_p leave tokens out."""
    counts: TokenCounts | None
    """None where no penalty is asked for."""
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None
    """Token ids and what is added to their logits."""
    stop_ids: npt.NDArray[np.int64]
    """Not to be sampled before min_tokens."""

    @staticmethod
    def create(
        params: SamplingParams, seed: int, eos_token_ids: Sequence[int], prompt: Sequence[int], output: Sequence[int]
    ) -> SamplingState | None:
        """None for a plain greedy request: its token is the argmax, and nothing needs to be remembered."""
        greedy = params.temperature < GREEDY_BELOW
        penalized = bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)
        if greedy and not (penalized or params.logit_bias or params.min_tokens or params.logprobs is not None):
            return None
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        bias = params.logit_bias
        return SamplingState(
            params=params,
            key=stream_key(seed),
            num_output_tokens=len(output),
            greedy=greedy,
            truncated=params.top_k > 0 or params.min_p > 0.0 or params.top_p < 1.0,
            counts=TokenCounts(prompt, output) if penalized else None,
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)) if bias else None,
            stop_ids=np.array(sorted(stop_ids), np.int64),
        )

    @property
    def changes_logits(self) -> bool:
        """Whether `adjust` has anything to do for the next token."""
        return self.counts is not None or self.bias is not None or self._stop_is_masked

    def adjust(self, logits: npt.NDArray[np.float32]) -> None:
        """Changes a row of logits [vocab] in place: logit_bias, then min_tokens, then penalties."""
        if self.bias is not None:
            ids, values = self.bias
            logits[ids] += values
        if self._stop_is_masked:
            logits[self.stop_ids] = -np.inf
        if self.counts is not None:
            self.counts.penalize(logits, self.params)

    def append(self, token_id: int) -> None:
        """Takes note of a sampled token."""
        self.num_output_tokens += 1
        if self.counts is not None:
            self.counts.add(token_id)

    @property
    def _stop_is_masked(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens and len(self.stop_ids) > 0
