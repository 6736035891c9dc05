"""From logits to tokens, for a batch of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.engines.messages import SamplingParams, TokenLogprobs
from penstock.engines.sampling.logprobs import token_logprobs
from penstock.engines.sampling.state import SamplingState
from penstock.engines.sampling.truncation import largest, nucleus
from penstock.engines.sampling.uniform import uniform

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class SampleResult:
    token_ids: npt.NDArray[np.int64]
    """[S]; -1 where the row has a NaN or an infinite maximum."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for those that asked."""


def sample(logits: Floats, states: Sequence[SamplingState | None]) -> SampleResult:
    """One token for each row of `logits` [S, vocab] f32, which is not changed. None in `states`: plain greedy.

    In this order: logprobs of the unscaled logits, logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p,
    one uniform number. The sampled tokens are appended to their states.
    """
    token_ids = logits.argmax(axis=1)
    # NaN is the argmax of a row that has one, so this one look finds NaN and +inf anywhere, and rows of -inf.
    bad = ~np.isfinite(logits[np.arange(len(token_ids)), token_ids])
    if bad.any():
        token_ids[bad] = -1
    result = SampleResult(token_ids)
    for row, state in enumerate(states):
        if state is not None and token_ids[row] >= 0:
            token_id = _choose(logits[row], int(token_ids[row]), state)
            token_ids[row] = token_id
            if state.params.logprobs is not None:
                result.logprobs[row] = token_logprobs(logits[row], token_id, state.params.logprobs)
            state.append(token_id)
    return result


def _choose(logits: Floats, likeliest: int, state: SamplingState) -> int:
    changed = _adjusted(logits, state)
    if changed is not logits:
        likeliest = int(changed.argmax())
    if state.greedy:
        return likeliest
    return draw(changed, float(changed[likeliest]), state.params, uniform(state.seed, state.num_output_tokens))


def _adjusted(logits: Floats, state: SamplingState) -> Floats:
    """`logits` itself, or a changed copy."""
    masked = state.num_output_tokens < state.params.min_tokens and len(state.stop_ids) > 0
    if not masked and state.bias is None and state.counts is None:
        return logits
    changed = logits.copy()
    if state.bias is not None:
        ids, values = state.bias
        changed[ids] += values
    if masked:
        changed[state.stop_ids] = -np.inf
    if state.counts is not None:
        state.counts.penalize(changed, state.params)
    return changed


def draw(logits: Floats, peak: float, params: SamplingParams, u: float) -> int:
    """A token by inverse CDF, in the order of ids. `peak` is the largest of `logits` [vocab], u in [0, 1)."""
    ids = None
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
        logits = logits[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - np.float32(peak)) / np.float32(params.temperature))
    if params.min_p > 0:
        weights[weights < params.min_p] = 0
    if params.top_p < 1:
        kept = nucleus(weights, params.top_p)
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    chosen = _inverse_cdf(weights, u)
    return chosen if ids is None else int(ids[chosen])


def _inverse_cdf(weights: Floats, u: float) -> int:
    sums = np.cumsum(weights, dtype=np.float64)
    # The largest number below the sum: rounding must not lead past the last token that has a weight.
    target = min(u * sums[-1], math.nextafter(sums[-1], 0.0))
    return int(np.searchsorted(sums, target, side="right"))
