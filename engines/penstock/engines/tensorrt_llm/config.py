"""The engine's settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.host.memory import parse_memory

Positive = Annotated[int, Meta(ge=1)]


class TensorRTLLMConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_dir: Path
    """A folder with config.json and safetensors."""
    dtype: str = "auto"
    """auto, or what the checkpoint says anyway (`checkpoint.check_settings`)."""
    quantization: str | None = None
    """None, or what the checkpoint says anyway."""
    kv_cache_dtype: str = "auto"
    """auto, fp8, or the checkpoint's own precision."""
    threads: int | None = None
    """Must be None: the computation has no threads on the CPU."""
    max_model_len: Positive | None = None
    """Prompt and output together; None: what the model was made for."""
    num_blocks: Positive | None = None
    """KV cache blocks; takes precedence over kv_cache_memory."""
    kv_cache_memory: Positive | None = None
    """Most bytes of KV cache on each GPU, within `memory_share`."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Of what the weights and a step of the greatest size leave free on each GPU: all of that goes to the KV cache.
    (vLLM's setting of this kind is a share of the whole GPU.)"""
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    prefix_caching: bool = True
    engine_args: dict[str, Any] = {}
    """More arguments of TensorRT-LLM's LLM (`arguments.checked`)."""
    adapters: dict[str, Path] = {}
    """Key -> folder of the LoRA adapters that are there from the start."""
    max_loras: Annotated[int, Meta(ge=0)] = 0
    """0: none can ever be loaded."""
    max_lora_rank: Positive = 16


def read_config(options: Mapping[str, Any]) -> TensorRTLLMConfig:
    """`options`: the fields as JSON; kv_cache_memory also as "4GiB".

    Raises InvalidRequestError for a value that is not allowed, UnsupportedError for one that has no place here.
    """
    memory = options.get("kv_cache_memory")
    if isinstance(memory, str):
        if memory.strip().endswith("%"):
            raise UnsupportedError(
                f"kv_cache_memory={memory}: TensorRT-LLM takes shares of a GPU's memory through gpu_memory_utilization",
                param="kv_cache_memory",
            )
        memory = parse_memory(memory)
    resolved = {**options, "kv_cache_memory": memory}
    try:
        return msgspec.convert(resolved, TensorRTLLMConfig, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the TensorRT-LLM engine's settings: {error}") from None
