"""Plain greedy requests: most steps of most servers, for which nothing has to be looked up or remembered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import GREEDY_BELOW, SamplingParams


def is_plain(params: SamplingParams) -> bool:
    """Whether each token is the one with the largest logit, and nothing else of the logits counts."""
    penalized = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    adjusted = penalized or params.logit_bias or params.min_tokens or params.processors
    limited = params.grammar is not None or params.bad_words or params.allowed_token_ids is not None
    random = params.temperature >= GREEDY_BELOW
    return not (random or adjusted or limited or params.logprobs is not None)


def largest(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """[S]: the likeliest token of each row of `logits` [S, vocab]; -1 where one is NaN, or the largest is infinite."""
    token_ids: npt.NDArray[np.int64] = logits.argmax(axis=1)
    # NaN is the argmax of a row that has one, so this one look finds NaN and +inf anywhere, and rows of -inf.
    token_ids[~np.isfinite(logits[np.arange(len(token_ids)), token_ids])] = -1
    return token_ids
