"""vLLM's own start-up: its configuration, its workers with the model, its KV cache."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from typing import Any, get_args

from pydantic import ValidationError
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.host.memory import available_memory
from penstock.engines.host.numa import read_nodes
from penstock.engines.kit.package_contract import refuse
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.engine_args import check_arguments, check_cache, check_generates, check_model, checked
from penstock.engines.vllm.sampling import CONFIG
from penstock.engines.vllm.step import blocks_to_ask_for

_DTYPES = {"auto": "auto", "bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_CACHE_DTYPES = {"auto": "auto", "bf16": "bfloat16", "f16": "float16", "fp8": "fp8"}
_CPU_CACHE_BYTES = 4 << 30
"""Most that the KV cache takes on a CPU by default, where it shares the memory with everything else."""
_WORKER_EXTENSION = "penstock.engines.vllm.worker.WorkerExtension"

OUR_SCHEDULER: dict[str, Any] = {
    # what our scheduler does, vLLM must not do as well
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
}


def start_for_steps(config: VLLMConfig, version: str) -> Any:
    """vLLM's EngineCore, of which only the executor will be used: what it does at its start is then done exactly as
    in vLLM. Raises UnsupportedError for a model that cannot be driven step by step, with all of it freed."""
    check_arguments(config.engine_args)
    core = _start(engine_arguments(config) | OUR_SCHEDULER | _extra(config), check_model, version)
    try:
        check_cache(core.scheduler.kv_cache_config)
    except UnsupportedError:
        core.shutdown()
        del core
        gc.collect()
        raise
    return core


def start_scheduling(config: VLLMConfig, version: str) -> Any:
    """vLLM's EngineCore with its own scheduler, for whatever vLLM can run."""
    return _start(engine_arguments(config) | own_scheduler(config) | _extra(config), check_generates, version)


def own_scheduler(config: VLLMConfig) -> dict[str, Any]:
    return {
        # None: as vLLM thinks best for the model
        "enable_prefix_caching": None if config.prefix_caching else False,
        "language_model_only": True,  # requests are text: no image encoder is loaded or profiled
        "skip_tokenizer_init": not has_tokenizer(config),  # grammars need it
        "structured_outputs_config": CONFIG,
    }


def has_tokenizer(config: VLLMConfig) -> bool:
    return (config.model_dir / "tokenizer.json").is_file()


def _start(arguments: dict[str, Any], check: Callable[[Any], None], version: str) -> Any:
    try:
        vllm_config = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, KeyError, NotImplementedError) as e:
        raise InvalidRequestError(f"vLLM refuses this configuration: {_in_a_line(e)}") from e
    check(vllm_config)
    core = _core_that_computes(vllm_config)
    if not vllm_config.use_v2_model_runner:
        moved = core.model_executor.collective_rpc("penstock_draw_by_position")
        refuse("vLLM", version, sorted(set().union(*moved)))
    return core


def _core_that_computes(vllm_config: Any) -> EngineCore:
    """On CPUs vLLM chooses kernels by the types of weights alone, and computes nothing while it starts: that its build
    for this processor lacks a kernel would show with the first request. So one token is computed here.

    Raises EngineError.
    """
    try:
        core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
        if current_platform.is_cpu():
            core.execute_dummy_batch()
    except Exception as e:
        raise EngineError(_why_it_cannot_run(e, vllm_config.model_config.quantization)) from e
    return core


def _why_it_cannot_run(error: Exception, quantization: str | None) -> str:
    """In a line: vLLM's reasons can have several."""
    kernel = re.search(r"_OpNamespace.* no attribute '(\w+)'", str(error))
    if kernel is None:
        return " ".join(f"vLLM cannot run this model: {type(error).__name__}: {error}".split())
    weights = f", which {quantization} weights need" if quantization else ""
    return f"vLLM cannot run this model here: its build for this processor lacks the kernel {kernel[1]}{weights}"


def _in_a_line(error: Exception) -> str:
    """pydantic's own text has a line for each part of it, with a link to its documentation."""
    if not isinstance(error, ValidationError):
        return str(error)
    errors = error.errors(include_url=False, include_context=False)
    return "; ".join(": ".join((*map(str, part["loc"]), part["msg"].removeprefix("Value error, "))) for part in errors)


def _extra(config: VLLMConfig) -> dict[str, Any]:
    extra = checked(config.engine_args, {field.name for field in dataclasses.fields(EngineArgs)})
    if "kv_cache_dtype" in extra and config.kv_cache_dtype != "auto":
        raise InvalidRequestError("engine_args: kv_cache_dtype is set there and as a setting of its own")
    return extra


def engine_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Our settings in the words of vLLM's EngineArgs."""
    if config.engine_args.get("load_format") != "dummy" and not any(config.model_dir.glob("*.safetensors")):
        raise EngineError(f"there are no safetensors in {config.model_dir}")
    cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(config.model_dir),
        "dtype": _DTYPES[config.dtype],
        "quantization": config.quantization,
        "kv_cache_dtype": _CACHE_DTYPES[config.kv_cache_dtype],
        "max_model_len": config.max_model_len or -1,  # the model's own, or what the KV cache can hold
        "block_size": 32 if cpu else 16,  # attention on CPUs wants a multiple of 32
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "gpu_memory_utilization": config.memory_share,
        "enforce_eager": cpu,  # without compilation it starts within seconds there
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if config.num_devices == 1 else "mp",
        "worker_extension_cls": _WORKER_EXTENSION,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "generation_config": "auto",  # only read for its EOS tokens
        "max_logprobs": -1,  # bounded by the gateway
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    memory = config.kv_cache_memory
    if config.num_blocks is not None:
        arguments["num_gpu_blocks_override"] = blocks_to_ask_for(config.num_blocks)
        memory = memory or (_memory_of_a_node() // 2 if cpu else None)  # a bound that is not used up
    elif memory is None and cpu:
        memory = min(_CPU_CACHE_BYTES, _memory_of_a_node() // 2)
    if memory is not None:
        arguments["kv_cache_memory_bytes"] = memory
    if config.adapter_slots:
        arguments |= {
            "enable_lora": True,
            # on CPUs rows without an adapter (-1) read the last slot: one more than are used stays all zeros
            "max_loras": config.adapter_slots + cpu,
            "max_lora_rank": next(rank for rank in get_args(MaxLoRARanks) if rank >= config.max_lora_rank),
        }
    return arguments


def _memory_of_a_node() -> int:
    """Free bytes of the NUMA node that has the fewest: a worker on CPUs puts its KV cache on one node, and vLLM refuses
    more than that has."""
    return min([available_memory(), *(node.free for node in read_nodes())])
