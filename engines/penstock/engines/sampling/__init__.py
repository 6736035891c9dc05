"""Choosing tokens from logits, in numpy: used by every runner of ours that has logits to choose from."""

from penstock.engines.sampling.logprobs import token_logprobs
from penstock.engines.sampling.sampler import Sampler, SampleResult
from penstock.engines.sampling.state import SamplingState

__all__ = ["SampleResult", "Sampler", "SamplingState", "token_logprobs"]
