"""Choosing tokens from logits, in numpy: used by every runner of ours that has logits to choose from."""

from penstock.engines.sampling.logprobs import token_logprobs
from penstock.engines.sampling.sampler import SampleResult, sample
from penstock.engines.sampling.state import SamplingState

__all__ = ["SampleResult", "SamplingState", "sample", "token_logprobs"]
