"""Choosing tokens from logits, in numpy: used by every runner of ours that has logits to choose from."""

from penstock.engines.kit.sampling.sampler import Extension, Sampler, token_logprobs_rows
from penstock.engines.kit.sampling.state import SamplingState

__all__ = ["Extension", "Sampler", "SamplingState", "token_logprobs_rows"]
