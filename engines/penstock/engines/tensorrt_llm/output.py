"""From TensorRT-LLM's RequestOutput, which grows, to what is new in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.engines.contract.continuous_batcher import NewTokens, StartRequest
from penstock.engines.contract.messages import FinishReason, TokenLogprobs
from penstock.engines.errors import EngineError, NumericalError

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Reader:
    """One request's."""

    def __init__(self, request: StartRequest, stops: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        """`stops`: the tokens that end it, `end_id` first."""
        self._id = request.id
        self._stops = stops
        self._named_stops = frozenset(request.params.stop_token_ids) - frozenset(eos_token_ids)
        self._top = request.params.logprobs
        self._num_read = 0
        self.has_ended = False

    @property
    def has_begun(self) -> bool:
        return self._num_read > 0

    def read(self, result: Any) -> NewTokens | None:
        """None when nothing is new. Raises EngineError for an answer that cannot be passed on."""
        output = result.outputs[0]
        start, tokens = self._num_read, [int(token) for token in output.token_ids[self._num_read :]]
        reason = self._reason(result, output)
        if not tokens and reason is None:
            return None
        self._num_read += len(tokens)
        self.has_ended = reason is not None
        new = NewTokens(self._id, tokens, reason)
        if reason is FinishReason.STOP:
            if not (tokens and tokens[-1] in self._stops):  # TRTLLMSampler keeps the end_id to itself
                tokens.append(self._stops[0])
            new.stop_token_id = tokens[-1] if tokens[-1] in self._named_stops else None
        if self._top is not None:
            rows = output.logprobs[start : start + len(tokens)]
            if len(rows) != len(tokens):
                raise EngineError(f"TensorRT-LLM told {len(rows)} logprobs for {len(tokens)} tokens")
            new.logprobs = [_entry(token, row, self._top) for token, row in zip(tokens, rows, strict=True)]
        if not start:
            new.num_cached_tokens = result.cached_tokens
        return new

    def _reason(self, result: Any, output: Any) -> FinishReason | None:
        if not result.finished:
            return None
        reason = _REASONS.get(output.finish_reason)
        if reason is None:
            raise EngineError(f"TensorRT-LLM ended a request by itself: {output.finish_reason}")
        return reason


def _entry(token: int, row: Any, top: int) -> TokenLogprobs:
    """`row`: token id -> its Logprob; the sampled one among them, more or fewer of the others than were asked for."""
    own = row.get(token) if isinstance(row, dict) else None
    if own is None:
        raise EngineError("TensorRT-LLM told no logprob of the token that it sampled")
    if not math.isfinite(own.logprob):
        raise NumericalError("the model's logits are not finite")
    likeliest = sorted(((i, p.logprob) for i, p in row.items()), key=lambda entry: -entry[1])
    rank = own.rank or 1 + sum(p > own.logprob for _, p in likeliest)
    return TokenLogprobs(token, own.logprob, rank, likeliest[:top])
