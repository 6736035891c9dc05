"""Settings of vLLM, under our scheduler and under its own, and the environment in which it is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.cache_size import check_choice, check_positive

Precision = Literal["auto", "bf16", "f16", "f32"]
KVCacheType = Literal["auto", "bf16", "f16", "fp8"]
HIGHEST_RANK = 512
"""Of a LoRA adapter, in vLLM."""


@dataclass(frozen=True)
class VLLMConfig:
    """Raises InvalidRequestError for a value that is not allowed, naming those that are."""

    model_dir: Path
    """A folder with config.json and safetensors."""
    dtype: Precision = "auto"
    """Precision of weights and computation. auto: as in the checkpoint (f32 becomes f16 or bf16)."""
    quantization: str | None = None
    """vLLM's name of a quantization; None: what the checkpoint says."""
    kv_cache_dtype: KVCacheType = "auto"
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for."""
    num_blocks: int | None = None
    """KV cache blocks; takes precedence over kv_cache_memory."""
    kv_cache_memory: int | None = None
    """Bytes of KV cache on each device; None: on GPUs what `memory_share` leaves, on CPUs a share of what is free."""
    memory_share: float = 0.9
    """Of a GPU's memory, for weights, activations and KV cache together."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    threads: int | None = None
    """OpenMP threads on a CPU; None: see `environment.default_threads`."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefix_caching: bool = True
    """Heeded by vLLM's own scheduler; ours has its own setting."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More fields of vLLM's EngineArgs (`engine_args.checked`)."""
    adapters: dict[str, Path] = field(default_factory=dict)
    """LoRA adapters that are loaded at the start, by key (`AdapterHost`)."""
    max_loras: int = 0
    """LoRA adapters loaded at the same time; 0: as many as `adapters`, and without any no LoRA at all."""
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(Precision))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheType))
        check_positive(self, "max_model_len", "num_blocks", "kv_cache_memory", "threads", optional=True)
        check_positive(self, "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size")
        check_positive(self, "max_lora_rank")
        if self.max_lora_rank > HIGHEST_RANK:
            raise InvalidRequestError(f"max_lora_rank={self.max_lora_rank} is above vLLM's {HIGHEST_RANK}")
        if self.max_loras:
            check_positive(self, "max_loras")
        if not 0 < self.memory_share <= 1:
            raise InvalidRequestError(f"memory_share={self.memory_share} is not within (0, 1]", param="memory_share")
        if not isinstance(self.engine_args, dict):
            raise InvalidRequestError(f"engine_args={self.engine_args!r} is not an object", param="engine_args")

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def adapter_slots(self) -> int:
        """How many LoRA adapters there can be at the same time."""
        return max(self.max_loras, len(self.adapters))


_SMALL_BYTES = 256 << 20
"""Weights below this are computed faster by one thread: handing a layer out to threads costs more than it saves."""


def prepare(config: VLLMConfig, cpu: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """To be called before vLLM and torch are imported. What an operator has set stays, but for what must be."""
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the engine process
    environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"  # a request with broken logits ends alone
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
        # the model is a local folder: nothing is to be fetched, and no hub to be asked
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if cpu:
        threads = str(config.threads or default_threads(config.model_dir))
        defaults |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # of worker processes: they share the machine with others
        }
        if config.threads is not None:
            environ["OMP_NUM_THREADS"] = threads
    for name, value in defaults.items():
        environ.setdefault(name, value)


def default_threads(model_dir: Path) -> int:
    """Compute threads for a model on the CPU: one for a small model, else one for each core that we may use."""
    size = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return 1 if size < _SMALL_BYTES else usable_cores()
