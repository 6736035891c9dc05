"""Models that vLLM runs but that cannot be driven through our scheduler's block tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.vllm.engine_args import OWN_SCHEDULER


def check_arguments(names: Iterable[str]) -> None:
    """Raises UnsupportedError for settings of vLLM's scheduler, which stands still under ours."""
    names = sorted(OWN_SCHEDULER.intersection(names))
    if names:
        refuse(f"{' and '.join(names)} (engine_args) is for vLLM's own scheduler")


def check_model(vllm_config: Any) -> None:
    """Raises UnsupportedError, with the reason, for a model that needs more of a step than token ids and blocks."""
    check_generates(vllm_config)
    model = vllm_config.model_config
    reasons = (
        (model.is_multimodal_model, "it is multimodal"),
        (model.is_hybrid or model.has_inner_state, "it keeps state outside the KV cache"),
        (vllm_config.speculative_config is not None, "it is configured for speculative decoding"),
    )
    for applies, reason in reasons:
        if applies:
            refuse(reason)


def check_generates(vllm_config: Any) -> None:
    """Raises UnsupportedError for a model that is not made for text after text, under either scheduler."""
    model = vllm_config.model_config
    if model.runner_type != "generate":
        raise UnsupportedError("vLLM cannot run this model here: it does not generate text")
    if model.is_encoder_decoder:
        raise UnsupportedError(
            "vLLM cannot run this model here: it is an encoder-decoder model, which wants two prompts"
        )


def check_cache(kv_cache_config: Any) -> None:
    """Raises UnsupportedError unless each group of layers keeps the keys and values of all tokens, or of a window."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    groups = kv_cache_config.kv_cache_groups
    if not groups:
        refuse("it has no KV cache")
    for group in groups:
        spec = group.kv_cache_spec
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
            refuse(f"some of its KV cache is of the kind {type(spec).__name__}")


def refuse(reason: str) -> None:
    """For what vLLM's own scheduler can run: `registry.load_core` leaves it to that one, or says so."""
    raise UnsupportedError(f"vLLM cannot run this model under Penstock's scheduler: {reason}", param="scheduler")
