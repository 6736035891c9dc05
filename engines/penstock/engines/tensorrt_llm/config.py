"""Settings of the engine, and what a model's folder says before TensorRT-LLM loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.formats.model_files import eos_token_ids, read_json
from penstock.engines.formats.model_settings import context_length
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


_PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True)
class CheckpointFacts:
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    precision: str
    """bf16, f16, f32, or a name that is none of ours."""
    quantization: str
    """As the checkpoint calls it, in lower case; empty for plain weights."""


def read_checkpoint(config: TensorRTLLMConfig) -> CheckpointFacts:
    """Raises EngineError for a folder that holds no model, InvalidRequestError where `max_model_len` must be given."""
    folder = config.model_dir
    settings = read_json(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise EngineError(f"there are no safetensors in {folder}")
    text = settings.get("text_config") or settings
    longest = config.max_model_len or context_length(text)
    if longest is None:
        raise InvalidRequestError(
            f"max_model_len must be given: {folder}/config.json does not say how long the context is"
        )
    dtype = text.get("dtype") or text.get("torch_dtype") or settings.get("torch_dtype") or "float32"
    vocab_size = int(text["vocab_size"])
    return CheckpointFacts(
        vocab_size=vocab_size,
        max_model_len=int(longest),
        eos_token_ids=eos_token_ids(folder, vocab_size),
        precision=_PRECISIONS.get(dtype, dtype),
        quantization=_quantization(folder, settings),
    )


def check_settings(config: TensorRTLLMConfig, checkpoint: CheckpointFacts) -> None:
    """The PyTorch backend computes as the checkpoint says.

    Raises UnsupportedError for a setting that wants otherwise.
    """
    if config.threads is not None:
        _refuse("threads", config.threads, "it computes on the GPU")
    if config.dtype not in ("auto", checkpoint.precision):
        _refuse("dtype", config.dtype, f"it computes in the checkpoint's precision, {checkpoint.precision}")
    if config.kv_cache_dtype not in ("auto", "fp8", checkpoint.precision):
        _refuse("kv_cache_dtype", config.kv_cache_dtype, f"it keeps keys and values in fp8 or {checkpoint.precision}")
    if config.quantization is not None and config.quantization.lower() != checkpoint.quantization:
        kind = checkpoint.quantization or "no quantization"
        _refuse("quantization", config.quantization, f"it runs what is in the checkpoint, and this one has {kind}")


def _refuse(name: str, value: object, reason: str) -> None:
    raise UnsupportedError(f"{name}={value}: not with TensorRT-LLM: {reason}", param=name)


def _quantization(folder: Path, settings: dict[str, Any]) -> str:
    """ModelOpt writes hf_quant_config.json; others write into config.json."""
    path = folder / "hf_quant_config.json"
    if path.is_file():
        name = read_json(path).get("quantization", {}).get("quant_algo")
    else:
        inside = settings.get("quantization_config") or {}
        name = inside.get("quant_algo") or inside.get("quant_method")
    return str(name or "").lower()
