"""Names of TensorRT-LLM that this engine uses, and what an iteration's statistics say by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engines.errors import EngineError
from penstock.engines.kit.package_contract import Contract

LLM_ARGS = "tensorrt_llm.llmapi.llm_args:TorchLlmArgs"
KV_CACHE_CONFIG = "tensorrt_llm.llmapi.llm_args:KvCacheConfig"

STATS = ("numActiveRequests", "kvCacheStats")
"""Keys of an iteration's statistics."""
KV_CACHE_STATS = ("maxNumBlocks", "freeNumBlocks", "tokensPerBlock")
"""Keys within kvCacheStats. A C++ struct writes them: they can be looked at only when the first ones have come."""

CONTRACT = Contract(
    calls={
        "tensorrt_llm:LLM.generate_async": (
            *("self", "inputs", "sampling_params", "lora_request", "streaming", "cache_salt"),
        ),
        "tensorrt_llm:LLM.get_stats_async": ("self", "timeout"),
        "tensorrt_llm:LLM.shutdown": ("self",),
        "tensorrt_llm.llmapi:RequestOutput.abort": ("self",),
        "tensorrt_llm.executor.result:IterationResult.mark_undone": ("self",),
    },
    fields={
        LLM_ARGS: (
            *("model", "skip_tokenizer_init", "tensor_parallel_size", "pipeline_parallel_size", "backend"),
            *("max_batch_size", "max_num_tokens", "max_seq_len", "kv_cache_config", "enable_chunked_prefill"),
            *("enable_iter_perf_stats", "lora_config", "sampler_type", "guided_decoding_backend"),
        ),
        KV_CACHE_CONFIG: (
            *("enable_block_reuse", "max_tokens", "free_gpu_memory_fraction", "max_gpu_total_bytes", "dtype"),
            "tokens_per_block",
        ),
        "tensorrt_llm.lora_helper:LoraConfig": (
            *("lora_target_modules", "max_lora_rank", "max_loras", "max_cpu_loras"),
        ),
        "tensorrt_llm.executor.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
        "tensorrt_llm:SamplingParams": (
            *("end_id", "pad_id", "max_tokens", "min_tokens", "stop_token_ids", "include_stop_str_in_output"),
            *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "embedding_bias", "logprobs", "detokenize", "guided_decoding"),
        ),
        "tensorrt_llm.llmapi:GuidedDecodingParams": ("json", "regex", "grammar"),
        "tensorrt_llm.executor.result:CompletionOutput": ("token_ids", "logprobs", "finish_reason"),
        "tensorrt_llm.executor.result:Logprob": ("logprob", "rank"),
    },
    attributes={"tensorrt_llm.executor.result:GenerationResultBase": ("cached_tokens",)},
    present=(
        "tensorrt_llm.llmapi:RequestOutput.outputs",
        "tensorrt_llm.llmapi:RequestOutput.finished",
        "tensorrt_llm.llmapi:RequestOutput.__anext__",
        "tensorrt_llm.executor.result:IterationResult.__anext__",
        "tensorrt_llm.executor.utils:RequestError",
    ),
)


@dataclass(frozen=True, slots=True)
class IterationSample:
    num_active: int
    """Requests that it worked on when the iteration began, those that ended in it included."""
    num_blocks: int
    num_free_blocks: int
    """Cached ones that nobody uses included."""
    block_size: int


def read_stats(stats: Mapping[str, Any]) -> IterationSample:
    """Raises EngineError that names what is missing."""
    cache = stats.get("kvCacheStats") or {}
    missing = [name for name in STATS if name not in stats] + [name for name in KV_CACHE_STATS if name not in cache]
    if missing:
        raise EngineError(f"TensorRT-LLM's statistics are not what this engine was made for: no {', '.join(missing)}")
    return IterationSample(
        stats["numActiveRequests"], cache["maxNumBlocks"], cache["freeNumBlocks"], cache["tokensPerBlock"]
    )
