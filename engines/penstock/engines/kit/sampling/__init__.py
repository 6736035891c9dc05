"""Choosing tokens from logits, in numpy: used by every runner of ours that has logits to choose from."""

from penstock.engines.kit.sampling.logprobs import token_logprobs
from penstock.engines.kit.sampling.sampler import Sampler, SampleResult
from penstock.engines.kit.sampling.state import SamplingState

__all__ = ["SampleResult", "Sampler", "SamplingState", "token_logprobs"]
