"""`activations=mixed`: small steps round activations to int8, large ones compute in bf16, on a CPU with AMX.

There OpenVINO's kernels for int8 take f32 alone and leave AMX unused. A step of 4 tokens takes half as long with them
as in bf16, one of 32 nine tenths; a prompt takes 1.4 times as long. So the model is compiled for both, over one KV
cache. That takes twice the memory for weights: the kernels of each pack them in their own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import openvino as ov

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.device import ThreadPlan
from penstock.engines.openvino.int8_kernels import rounds_activations
from penstock.engines.openvino.kv_types import QUANTIZED_KV

_LEAST_TOKENS_IN_BF16 = 48
"""Of a step. With int4, 32 tokens took 0.9 and 64 tokens 1.13 times as long in int8 as in bf16."""


def settle_mixed(core: ov.Core, config: OpenVINOConfig, *, all_integers: bool) -> OpenVINOConfig:
    """The settings of small steps. `all_integers`: every matrix of the decoder is in 8 or 4 bits.

    Keys and values are in 8 bits, unless 4 are asked for: attention in f32 and in bf16 have no other type in common.
    Raises InvalidRequestError for settings that do not go with it, UnsupportedError where there is nothing to mix.
    """
    if not all_integers:
        raise InvalidRequestError(
            "activations=mixed needs weights=int8 or weights=int4, and no experts in MXFP4", param="activations"
        )
    if config.dtype != "auto":
        raise InvalidRequestError("activations=mixed does not go with a dtype", param="activations")
    kv_type = "u8" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if kv_type not in QUANTIZED_KV:
        raise InvalidRequestError(
            f"kv_cache_dtype={kv_type} does not go with activations=mixed; {', '.join(QUANTIZED_KV)} do",
            param="kv_cache_dtype",
        )
    device, has = config.device, core.get_property(config.device, "OPTIMIZATION_CAPABILITIES")
    if "BF16" not in has or not rounds_activations(device, "f32") or rounds_activations(device, "bf16"):
        raise UnsupportedError(
            f"activations=mixed is not offered by this {device}: it is for those with AMX; use auto",
            param="activations",
        )
    return replace(config, dtype="f32", activations="int8", kv_cache_dtype=kv_type)


def with_large_steps(plans: Sequence[ThreadPlan], most_tokens: int) -> list[ThreadPlan]:
    """And one for large steps, where steps of `most_tokens` are."""
    least = max(_LEAST_TOKENS_IN_BF16, plans[-1].min_tokens + 1)
    large = [ThreadPlan(plans[-1].threads, least, in_bf16=True)] if least <= most_tokens else []
    return [*plans, *large]


def of_drafts(config: OpenVINOConfig) -> OpenVINOConfig:
    """What guesses computes a few tokens of each request, and keeps its weights once."""
    return replace(config, activations="int8") if config.activations == "mixed" else config
