"""Our settings as arguments of TensorRT-LLM's LLM, and `engine_args`, its arguments that we do not know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.tensorrt_llm.config import CheckpointFacts, TensorRTLLMConfig
from penstock.engines.tensorrt_llm.sampling import BACKEND

_TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""

OURS = {
    "model": "model",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "lora_config": "lora, max_loras and max_lora_rank",
    "enable_lora": "lora, or lora_directory",
}
"""An argument -> the setting of ours that says the same."""
OURS_OF_CACHE = {
    "free_gpu_memory_fraction": "gpu_memory_utilization",
    "max_tokens": "num_kv_blocks",
    "max_gpu_total_bytes": "kv_cache_memory",
    "dtype": "kv_cache_dtype",
    "enable_block_reuse": "prefix_caching",
}
"""The same within kv_cache_config."""

_GATEWAY = "prompts are rendered and tokenized by Penstock"
_PYTORCH = "this engine is made for the PyTorch backend"
NOT_HERE = {
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _GATEWAY),
    **dict.fromkeys(("num_postprocess_workers", "postprocess_tokenizer_dir", "reasoning_parser"), _GATEWAY),
    "backend": _PYTORCH,
    "revision": "the model is a local folder",
    "max_beam_width": "a request is one sequence of tokens",
    "enable_iter_perf_stats": "the statistics are always on: they say when an aborted request is gone",
    "enable_attention_dp": "its statistics are those of one rank, and would not say when an aborted request is gone",
    "batched_logits_processor": "it is a Python object",
}
"""Arguments that would have no effect or a wrong one, with the reason."""


def llm_arguments(config: TensorRTLLMConfig, checkpoint: CheckpointFacts) -> dict[str, Any]:
    """Of the LLM; `kv_cache_config` and `lora_config` are the fields of theirs."""
    arguments: dict[str, Any] = {
        "model": str(config.model_dir),
        "backend": "pytorch",
        "skip_tokenizer_init": BACKEND not in config.engine_args,  # grammars need the tokenizer
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "max_seq_len": checkpoint.max_model_len,
        "enable_chunked_prefill": True,  # without it no prompt may be longer than a step
        "enable_iter_perf_stats": True,
        "kv_cache_config": _cache(config),
    }
    if config.max_loras:
        arguments["lora_config"] = {
            "lora_target_modules": list(TARGET_MODULES.values()),
            "max_lora_rank": config.max_lora_rank,
            "max_loras": config.max_loras,
            "max_cpu_loras": config.max_loras,
        }
    passed = {name: value for name, value in config.engine_args.items() if name != "kv_cache_config"}
    return arguments | passed


TARGET_MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
}
"""What adapters may change: transformers' names, and TensorRT-LLM's (its lora_helper)."""


def _cache(config: TensorRTLLMConfig) -> dict[str, Any]:
    own: dict[str, Any] = config.engine_args.get("kv_cache_config", {})
    cache = {"free_gpu_memory_fraction": config.memory_share, "enable_block_reuse": config.prefix_caching, **own}
    if config.kv_cache_dtype == "fp8":
        cache["dtype"] = "fp8"
    if config.num_blocks is not None:
        cache["max_tokens"] = config.num_blocks * cache.setdefault("tokens_per_block", _TOKENS_PER_BLOCK)
    elif config.kv_cache_memory is not None:
        cache["max_gpu_total_bytes"] = config.kv_cache_memory
    return cache


def check_engine_args(arguments: Mapping[str, Any], known: Collection[str], known_of_cache: Collection[str]) -> None:
    """`known`: the arguments that the installed release takes, and within its kv_cache_config.

    Raises InvalidRequestError for an unknown name or one that a setting of ours decides, UnsupportedError for one that
    has no place here.
    """
    if arguments.get("trust_remote_code"):
        raise UnsupportedError("engine_args: trust_remote_code: this server never runs code that comes with a model")
    _check("", arguments, known, OURS)
    cache = arguments.get("kv_cache_config", {})
    if not isinstance(cache, Mapping):
        raise InvalidRequestError("engine_args: kv_cache_config is not an object", param="engine_args")
    _check("kv_cache_config.", cache, known_of_cache, OURS_OF_CACHE)


def _check(prefix: str, arguments: Mapping[str, Any], known: Collection[str], ours: Mapping[str, str]) -> None:
    for name in arguments:
        if name in ours:
            message = f"engine_args: {prefix}{name} is Penstock's setting {ours[name]}"
            raise InvalidRequestError(message, param="engine_args")
        if not prefix and name in NOT_HERE:
            message = f"engine_args: {name} is not possible here: {NOT_HERE[name]}"
            raise UnsupportedError(message, param="engine_args")
        if name not in known:
            near = get_close_matches(name, known, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            message = f"engine_args: TensorRT-LLM has no argument {prefix}{name}{hint}"
            raise InvalidRequestError(message, param="engine_args")
