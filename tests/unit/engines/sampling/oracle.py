"""Sampling as it is defined, with full sorts and float64, to compare with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import SamplingParams

Doubles = npt.NDArray[np.float64]


def distribution(logits: npt.NDArray[np.float32], params: SamplingParams) -> Doubles:
    """Probabilities [vocab] after temperature, min_p, top_k and top_p."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    order = np.lexsort((np.arange(len(logits)), -probabilities))
    keep = np.ones(len(logits), bool)
    if params.min_p > 0:
        keep &= probabilities >= params.min_p * probabilities.max()
    if params.top_k > 0:
        keep[order[params.top_k :]] = False
    probabilities = np.where(keep, probabilities, 0.0)
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        sums = np.cumsum(probabilities[order])
        probabilities[order[int(np.searchsorted(sums, params.top_p)) + 1 :]] = 0.0
    return probabilities / probabilities.sum()


def adjusted(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    eos_token_ids: tuple[int, ...],
) -> Doubles:
    """Logits after logit_bias, min_tokens and penalties, token by token."""
    row = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)):
            row[token] = -np.inf
    for token in {*prompt, *output}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    return row
