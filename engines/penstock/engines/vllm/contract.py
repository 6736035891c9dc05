"""What this runner uses of vLLM's internals, by name; checked at the start, so that a release that moved something is
refused with the name of what has moved, and not with wrong tokens later."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from penstock.engines.errors import EngineError

CALLS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs": (
        *("model", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "block_size", "max_num_seqs"),
        *("max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "tensor_parallel_size"),
        *("pipeline_parallel_size", "distributed_executor_backend", "worker_extension_cls", "load_format"),
        *("trust_remote_code", "skip_tokenizer_init", "generation_config", "max_logprobs", "enable_prefix_caching"),
        *("enable_chunked_prefill", "async_scheduling", "disable_hybrid_kv_cache_manager", "disable_log_stats"),
        *("num_gpu_blocks_override", "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank"),
    ),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self",),
    "vllm.v1.engine.core:EngineCore": ("vllm_config", "executor_class", "log_stats"),
    "vllm.v1.engine.core:EngineCore.shutdown": ("self",),
    "vllm.v1.executor:Executor.get_class": ("vllm_config",),
    "vllm.v1.executor:Executor.collective_rpc": ("self", "method", "args"),
    "vllm.v1.executor:Executor.execute_model": ("self", "scheduler_output", "non_block"),
    "vllm.v1.executor:Executor.sample_tokens": ("self", "grammar_output"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        *("req_id", "prompt_token_ids", "mm_features", "sampling_params", "generator", "block_ids"),
        *("num_computed_tokens", "output_token_ids", "lora_request"),
    ),
    "vllm.v1.outputs:LogprobsLists.slice_request": ("self", "req_idx", "num_positions"),
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
        *("req_ids", "resumed_req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"),
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
        *("finished_req_ids", "kv_cache_block_copies"),
    ),
    "vllm.v1.core.sched.output:GrammarOutput": ("structured_output_request_ids", "grammar_bitmask"),
    "vllm.v1.outputs:ModelRunnerOutput": (
        *("req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict", "num_nans_in_logits"),
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
    "vllm.sampling_params:SamplingParams": (
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs"),
        *("prompt_logprobs", "logit_bias", "detokenize", "_all_stop_token_ids"),
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
    "vllm.platforms:current_platform.is_cpu",
    "vllm.exceptions:VLLMValidationError",
)


def check_contract(version: str) -> None:
    """Raises EngineError that names everything that is not where it was."""
    moved = list(differences())
    if moved:
        raise EngineError(f"vLLM {version} is not what this runner was made for: {'; '.join(moved)}")


def differences() -> Iterator[str]:
    """What of the contract does not hold with the installed vLLM, in words."""
    for path in (*CALLS, *FIELDS, *ORDERED, *PRESENT):
        try:
            there = resolve(path)
        except (ImportError, AttributeError) as e:
            yield f"{path} is gone ({e})"
            continue
        if path in CALLS:
            yield from _missing(path, "parameter", CALLS[path], inspect.signature(there).parameters)
        elif path in FIELDS:
            yield from _missing(path, "field", FIELDS[path], field_names(there))
        elif path in ORDERED and tuple(there._fields[: len(ORDERED[path])]) != ORDERED[path]:
            yield f"{path} begins with {', '.join(there._fields)}"


def resolve(path: str) -> Any:
    """`module:name.name`."""
    module, _, names = path.partition(":")
    thing: Any = import_module(module)
    for name in names.split("."):
        thing = getattr(thing, name)
    return thing


def field_names(there: Any) -> set[str]:
    """Of a dataclass or a msgspec struct."""
    if dataclasses.is_dataclass(there):
        return {f.name for f in dataclasses.fields(there)}
    return set(there.__struct_fields__)


def _missing(path: str, kind: str, wanted: Iterable[str], there: Iterable[str]) -> Iterator[str]:
    known = set(there)
    yield from (f"{path} has no {kind} {name!r}" for name in wanted if name not in known)
