"""From logits to tokens, for a batch of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import TokenLogprobs
from penstock.engines.kit.sampling.logprobs import token_logprobs
from penstock.engines.kit.sampling.state import SamplingState
from penstock.engines.kit.sampling.truncation import truncate
from penstock.engines.kit.sampling.uniform import uniform

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 256
"""Weights are summed by blocks of this many tokens; only the block that the number falls into is walked through."""
_SLAB_ELEMENTS = 1 << 18
"""Logits worked on at a time: 1 MiB, which stays in a core's cache."""


@dataclass(slots=True)
class SampleResult:
    token_ids: Ids
    """[S]; -1 where the row has a NaN or an infinite maximum."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for those that asked."""


class Sampler:
    """Chooses tokens; holds nothing but working memory. Not for use from several threads."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        blocks = -(-vocab_size // _BLOCK)
        self._slab = np.empty((max(1, _SLAB_ELEMENTS // (blocks * _BLOCK)), blocks * _BLOCK), np.float32)

    def sample(self, logits: Floats, states: Sequence[SamplingState | None]) -> SampleResult:
        """One token for each row of `logits` [S, vocab] f32, which is not changed. None in `states`: plain greedy.

        In this order: logprobs of the unscaled logits, logit_bias, min_tokens, penalties, temperature, min_p, top_k,
        top_p, one uniform number. The tokens are appended to their states.
        """
        token_ids = logits.argmax(axis=1)
        # NaN is the argmax of a row that has one, so this one look finds NaN and +inf anywhere, and rows of -inf.
        bad = ~np.isfinite(logits[np.arange(len(token_ids)), token_ids])
        if bad.any():
            token_ids[bad] = -1
        active = [row for row, state in enumerate(states) if state is not None and token_ids[row] >= 0]
        height = len(self._slab)
        for start in range(0, len(active), height):
            self._choose(logits, active[start : start + height], states, token_ids)
        result = SampleResult(token_ids)
        for row in active:
            state, token_id = states[row], int(token_ids[row])
            if state is None:
                continue
            if state.params.logprobs is not None:
                result.logprobs[row] = token_logprobs(logits[row], token_id, state.params.logprobs)
            state.append(token_id)
        return result

    def _choose(self, logits: Floats, rows: list[int], states: Sequence[SamplingState | None], token_ids: Ids) -> None:
        """Replaces the argmax of these rows, which fit in the slab, by their tokens."""
        drawn: list[int] = []
        peaks, temperatures, numbers = [], [], []
        truncated: list[tuple[int, SamplingState]] = []
        for row in rows:
            state = states[row]
            if state is None or (state.greedy and not state.changes_logits):
                continue
            slot = self._slab[len(drawn), : self._vocab_size]
            slot[:] = logits[row]
            if state.changes_logits:
                state.adjust(slot)
                token_ids[row] = slot.argmax()
            if state.greedy:
                continue
            if state.truncated:
                truncated.append((len(drawn), state))
            drawn.append(row)
            peaks.append(slot[token_ids[row]])
            temperatures.append(state.params.temperature)
            numbers.append(uniform(state.key, state.num_output_tokens))
        if not drawn:
            return
        weights = self._to_weights(np.array(peaks, np.float32), np.array(temperatures, np.float32))
        for n, state in truncated:
            truncate(weights[n, : self._vocab_size], state.params)
        token_ids[drawn] = _inverse_cdf(weights, np.array(numbers))

    def _to_weights(self, peaks: Floats, temperatures: Floats) -> Floats:
        """The first rows of the slab, from logits to e^((logit - peak) / temperature); 0 beyond the vocabulary."""
        weights = self._slab[: len(peaks)]
        weights[:, self._vocab_size :] = -np.inf
        with np.errstate(over="ignore", under="ignore"):
            weights -= peaks[:, None]
            weights /= temperatures[:, None]
            np.exp(weights, out=weights)
        return weights


def _inverse_cdf(weights: Floats, numbers: npt.NDArray[np.float64]) -> Ids:
    """For each row of `weights` [n, blocks * _BLOCK] the first id at which the sum exceeds number * total."""
    rows = np.arange(len(weights))
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    sums = np.cumsum(blocks.sum(axis=2), axis=1, dtype=np.float64)
    targets = numbers * sums[:, -1]
    chosen = np.minimum((sums <= targets[:, None]).sum(axis=1), blocks.shape[1] - 1)
    inside = blocks[rows, chosen]
    before = np.where(chosen > 0, sums[rows, chosen - 1], 0.0)
    walked = np.cumsum(inside, axis=1, dtype=np.float64)
    offsets = (walked <= (targets - before)[:, None]).sum(axis=1)
    # Rounding may lead a hair past the last token of the block that has a weight: that token it is, then.
    last = _BLOCK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    ids: Ids = chosen * _BLOCK + np.minimum(offsets, last)
    return ids
