"""Token counts of one request, and the penalties that depend on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import SamplingParams


class TokenCounts:
    """How often each token occurs in the output; prompt tokens are known too, with count 0.

    Kept as pairs of id and count, so that a step costs what the request is long and not the whole vocabulary.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        ids = np.unique(np.asarray([*prompt, *output], np.int64))
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Counts one more output token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._size
            self._size += 1
            if slot == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * slot), np.resize(self._counts, 2 * slot)
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += 1

    def penalize(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """Changes `logits` [vocab] in place.

        Repetition: tokens of prompt and output, positive logits divided, negative ones multiplied (arXiv:1909.05858).
        Frequency and presence: tokens of the output, count * frequency and once presence subtracted (OpenAI's API).
        """
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        repetition = np.float32(params.repetition_penalty)
        if repetition != 1:
            values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values
