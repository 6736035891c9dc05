"""From settings to the options of each engine's runner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.llm.adapters import Adapter
from penstock.gateway.llm.models import ModelSource, find_model
from penstock.tokenizers import Tokenizer


def _openvino_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    if config.model.device not in ("auto", "cpu"):
        raise ConfigError(f"device: the openvino engine runs on cpu, not on {config.model.device}")
    return _common_options(config, source, scheduler) | {
        "weights": config.model.weights,
        "activations": config.model.activations,
        "weights_cache": config.model.weights_cache,
        "draft_model_dir": _draft_folder(config.model.speculative_model),
        "mtp": config.scheduling.speculative == "mtp",
    }


def _draft_folder(model: str | None) -> str | None:
    """What is on the hub has been downloaded (`fetch_draft_model`)."""
    if model is None:
        return None
    try:
        return str(find_model(model).folder)
    except ConfigError as error:
        raise ConfigError(f"speculative-{error}") from None


def _torch_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    if config.model.weights != "auto":
        raise ConfigError("weights: the torch engine keeps weights in the precision of the computation (dtype)")
    return _common_options(config, source, scheduler) | {"device": config.model.device}


def _large_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Of vLLM and TensorRT-LLM."""
    if config.model.weights != "auto":
        raise ConfigError("weights: this engine keeps them as the checkpoint does, or in the precision of dtype")
    if config.model.device != "auto":
        raise ConfigError("device: this engine runs on what it was built for; CUDA_VISIBLE_DEVICES chooses among GPUs")
    return _common_options(config, source, scheduler) | {
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "pipeline_parallel_size": config.engine.pipeline_parallel_size,
        "memory_share": config.engine.gpu_memory_utilization,
        "quantization": config.engine.quantization,
        "engine_args": _engine_args(config.engine.engine_args),
        "prefix_caching": config.cache.prefix_caching,
    }


def _engine_args(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"engine-args: not a JSON object: {error}") from None


def _common_options(config: Config, source: ModelSource, scheduler: SchedulerConfig) -> dict[str, Any]:
    model, cache = config.model, config.cache
    return {
        "model_dir": str(source.folder),
        "dtype": model.dtype,
        "kv_cache_dtype": model.kv_cache_dtype,
        "threads": model.threads,
        "max_model_len": model.max_model_len,
        "num_blocks": cache.num_kv_blocks,
        "kv_cache_memory": None if cache.kv_cache_memory is None else str(cache.kv_cache_memory),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def adapter_options(config: Config, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Room for all that are given, whatever the limit; for none where adapters can neither be given nor come."""
    wanted = bool(adapters or config.adapters.lora_directory)
    return {
        "adapters": {adapter.key: str(adapter.folder) for adapter in adapters},
        "max_loras": max(config.adapters.max_loras, len(adapters)) if wanted else 0,
        "max_lora_rank": config.adapters.max_lora_rank,
    }


def _simulated_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    simulated = config.simulated
    first, end = _plain_ids(tokenizer)
    options: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "first_token_id": first,
        "end_token_id": end,
        "faults": simulated.sim_faults,
        "latency": {
            "per_step": simulated.sim_step_ms / 1e3,
            "per_prefill_token": simulated.sim_prefill_us / 1e6,
            "per_sequence": simulated.sim_sequence_us / 1e6,
        },
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_caching": config.cache.prefix_caching,
    }
    if config.model.max_model_len is not None:
        options["max_model_len"] = config.model.max_model_len
    if config.cache.num_kv_blocks is not None:
        options["num_blocks"] = config.cache.num_kv_blocks
    return options


def _plain_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The longest range [first, end) of ids without special tokens: what the simulated engine may say."""
    edges = [-1, *sorted(tokenizer.special_ids), tokenizer.vocab_size]
    spans = [(after - before - 1, before + 1, after) for before, after in pairwise(edges)]
    _, first, end = max(spans)
    return first, end


_OPTIONS = {
    "openvino": _openvino_options,
    "simulated": _simulated_options,
    "tensorrt_llm": _large_options,
    "torch": _torch_options,
    "vllm": _large_options,
}


def runner_options(
    runner: str, config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """`EngineSpec.options` without adapters. Raises ConfigError for settings that this runner would not heed."""
    return _OPTIONS[runner](config, source, scheduler, tokenizer)
