"""vLLM's own start-up: its configuration, its workers with the model, its KV cache."""

from __future__ import annotations

from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from penstock.engines.errors import EngineError
from penstock.engines.memory import available_memory
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.requests import blocks_to_ask_for
from penstock.engines.vllm.supported import check_cache, check_model

_DTYPES = {"auto": "auto", "bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_CACHE_DTYPES = {"auto": "auto", "bf16": "bfloat16", "f16": "float16", "fp8": "fp8"}
_CPU_CACHE_BYTES = 4 << 30
"""Most that the KV cache takes on a CPU by default, where it shares the memory with everything else."""
_WORKER_EXTENSION = "penstock.engines.vllm.worker.WorkerExtension"


def start(config: VLLMConfig) -> Any:
    """vLLM's EngineCore, of which only the executor will be used: what it does at its start is then done exactly as
    in vLLM. Raises UnsupportedError for a model that cannot be driven step by step."""
    vllm_config = EngineArgs(**engine_arguments(config)).create_engine_config()
    check_model(vllm_config)
    core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    try:
        check_cache(core.scheduler.kv_cache_config)
    except Exception:
        core.shutdown()
        raise
    return core


def engine_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Our settings in the words of vLLM's EngineArgs."""
    if not any(config.model_dir.glob("*.safetensors")):
        raise EngineError(f"there are no safetensors in {config.model_dir}")
    cpu = current_platform.is_cpu()
    eager = cpu if config.enforce_eager is None else config.enforce_eager
    arguments: dict[str, Any] = {
        "model": str(config.model_dir),
        "dtype": _DTYPES[config.dtype],
        "quantization": config.quantization,
        "kv_cache_dtype": _CACHE_DTYPES[config.kv_cache_dtype],
        "max_model_len": config.max_model_len,
        "block_size": config.block_size or (32 if cpu else 16),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "gpu_memory_utilization": config.memory_share,
        "enforce_eager": eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "distributed_executor_backend": _backend(config),
        "worker_extension_cls": _WORKER_EXTENSION,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "generation_config": "auto",  # only read for its EOS tokens
        "max_logprobs": -1,  # bounded by the gateway
        # what our scheduler does, vLLM must not do as well
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,  # one block table for all layers wherever that is possible
        "disable_log_stats": True,
    }
    memory = config.kv_cache_memory
    if config.num_blocks is not None:
        arguments["num_gpu_blocks_override"] = blocks_to_ask_for(config.num_blocks)
        memory = memory or (available_memory() // 2 if cpu else None)  # a bound that is not used up
    elif memory is None and cpu:
        memory = min(_CPU_CACHE_BYTES, available_memory() // 2)
    if memory is not None:
        arguments["kv_cache_memory_bytes"] = memory
    if config.adapters:
        arguments |= {
            "enable_lora": True,
            # on CPUs rows without an adapter (-1) read the last slot: one more than are used stays all zeros
            "max_loras": len(config.adapters) + cpu,
            "max_lora_rank": config.max_lora_rank,
        }
    return arguments


def _backend(config: VLLMConfig) -> str:
    if config.executor != "auto":
        return config.executor
    return "uni" if config.num_devices == 1 else "mp"
