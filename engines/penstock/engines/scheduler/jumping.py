"""Jumping ahead: tokens that a grammar leaves no choice about."""

from __future__ import annotations

from penstock.engines.contract.messages import SamplingParams


def jumps_ahead(params: SamplingParams) -> bool:
    """Whether forced tokens may go without being sampled: nobody asks for their logprobs, and nothing but the grammar
    could take one of them away."""
    limited = params.allowed_token_ids is not None or params.bad_words or params.processors or params.min_tokens
    return params.logprobs is None and not limited
