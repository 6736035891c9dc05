"""`engine_args`, settings of vLLM's own by the names of its EngineArgs, and models that it runs but that cannot be
driven through our block tables. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError

OURS = {
    "model": "model",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "quantization": "quantization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "enable_prefix_caching": "prefix_caching",
    "enable_lora": "lora, or lora_directory",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "shutdown_timeout": "drain_timeout",
}
"""vLLM's name -> the setting of ours that says the same."""

_GATEWAY = "prompts are rendered and tokenized by Penstock"
_ONE_ENGINE = "an engine process drives one vLLM engine; more copies are more models or more servers"
_TEXT = "Penstock asks vLLM for generated tokens, and takes nothing else from it"
NOT_HERE = {
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "tokens_only"), _GATEWAY
    ),
    **dict.fromkeys(("reasoning_parser", "reasoning_parser_plugin", "renderer_num_workers"), _GATEWAY),
    **dict.fromkeys(("revision", "code_revision", "hf_token", "download_dir"), "the model is a local folder"),
    **dict.fromkeys(("_api_process_count", "_api_process_rank", "disable_frontend_multiprocessing"), _ONE_ENGINE),
    **dict.fromkeys(("runner", "convert", "pooler_config", "enable_prompt_embeds", "enable_mm_embeds"), _TEXT),
    **dict.fromkeys(("enable_return_routed_experts", "return_sampling_mask", "mm_encoder_only"), _TEXT),
    "max_logprobs": "Penstock bounds them",
    "worker_extension_cls": "Penstock has an extension of its own there",
    "default_mm_loras": "adapters are named by requests",
    "enable_sleep_mode": "models are loaded and unloaded instead",
}
"""Names that would have no effect, with the reason."""

LOGGING = ("disable_log_requests", "enable_log_requests", "disable_log_stats")
"""Accepted, since they are in many model.json files: requests are not logged, and the counters are Penstock's."""

OWN_SCHEDULER = frozenset(
    {
        *("speculative_config", "spec_method", "spec_model", "spec_tokens", "diffusion_config"),
        *("kv_transfer_config", "kv_events_config", "kv_offloading_size", "kv_offloading_backend"),
        *("ec_transfer_config", "ec_manager_config", "async_scheduling", "scheduling_policy", "scheduler_cls"),
        *("max_num_scheduled_tokens", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"),
        *("prefill_schedule_interval", "scheduler_reserve_full_isl", "watermark", "enable_chunked_prefill"),
        *("prefix_caching_hash_algo", "prefix_cache_retention_interval", "prefix_match_unit", "swa_bounded_replay"),
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
    }
)
"""Names that only vLLM's own scheduler supports."""

_CODE_FORMATS = ("pt", "npcache")


def checked(arguments: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Those that go to vLLM. `known`: the fields of the installed release's EngineArgs.

    Raises InvalidRequestError for an unknown name, and for one that has no place here, with the reason.
    """
    passed = {}
    for name, value in arguments.items():
        if name in LOGGING:
            continue
        if name in OURS:
            raise InvalidRequestError(f"engine_args: {name} is Penstock's setting {OURS[name]}", param="engine_args")
        reason = NOT_HERE.get(name) or _refused_value(name, value)
        if reason:
            raise InvalidRequestError(
                f"engine_args: {name}={value!r} is not for Penstock: {reason}", param="engine_args"
            )
        if name not in known:
            near = get_close_matches(name, known, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidRequestError(f"engine_args: vLLM has no setting {name!r}{hint}", param="engine_args")
        passed[name] = value
    return passed


def _refused_value(name: str, value: Any) -> str | None:
    if name == "trust_remote_code" and value:
        return "this server never runs code that comes with a model"
    if name == "load_format" and value in _CODE_FORMATS:
        return "pickled weights can hold code; convert them to safetensors"
    if name.startswith("data_parallel_") and value not in (1, None, False):
        return _ONE_ENGINE
    return None


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
