"""The runner's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from penstock.engines.kit.cache_size import check_choice, check_positive

Precision = Literal["auto", "bf16", "f16", "f32"]
WeightsType = Literal["auto", "bf16", "f16", "f32", "int8", "int4"]
Activations = Literal["auto", "int8", "mixed", "bf16", "f16", "f32"]
KVCacheType = Literal["auto", "u8", "u8-u4", "u4", "bf16", "f16", "f32"]
Device = Literal["CPU"]

QUANTIZED = ("int8", "int4")
"""Types of weights that are no floats."""


@dataclass(frozen=True)
class OpenVINOConfig:
    """Raises InvalidRequestError for a value that is not allowed, naming those that are."""

    model_dir: Path
    dtype: Precision = "auto"
    """Precision of the computation. auto: see `numerics.resolve`."""
    weights: WeightsType = "auto"
    """How weights are held. auto: as in the checkpoint; of a quantized one, 8-bit floats become bf16, and 4-bit floats
    int4. int8: symmetric, one scale for each output row. int4: see `quantization`."""
    activations: Activations = "auto"
    """What is multiplied by weights in 8 and 4 bits. int8: rounded as they come, with a scale for each group of a
    token's values; where the device does that in f32 alone, dtype=auto means f32. auto: int8 where that changes no
    dtype, else as `dtype`. A float type has to be that of the computation. mixed: see `Numerics`."""
    weights_cache: int = 20 << 30
    """Bytes of quantized weights that are kept on disk for later starts; 0: none."""
    kv_cache_dtype: KVCacheType = "auto"
    """auto: as `dtype`, but f16 where only activations=int8 made that f32. u8, u4: quantized, see `kv_types.KVType`;
    u8-u4: keys in 8 bits, values in 4."""
    threads: int | None = None
    """Compute threads; None: see `device.default_threads`."""
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for. More than that is an error."""
    num_blocks: int | None = None
    """KV cache blocks; takes precedence over kv_cache_memory."""
    kv_cache_memory: int | None = None
    """Bytes of KV cache; None: a share of the free memory, no more than max_num_seqs full requests can use."""
    state_interval: int | None = None
    """Tokens between checkpoints of recurrent states, a multiple of the block size. None: by the model's sizes. Without
    recurrent layers it is not looked at."""
    max_num_seqs: int = 256
    """Requests that live at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step; more are computed all the same, after the input buffers have grown."""
    device: Device = "CPU"
    """Elsewhere the cache would have to be tensors of the device, which the block copies here are not made for."""
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    """LoRA adapters that are loaded with the model: their folders by key (`AdapterHost`)."""
    max_loras: int = 0
    """LoRA adapters that may be loaded at the same time; 0: none at all, and the graph has no inputs for them."""
    max_lora_rank: int = 16
    draft_model_dir: Path | None = None
    """A smaller model with the same vocabulary, which guesses what the model will say. It is computed in the same
    precision, with weights of the same type, and its KV cache takes its part of the memory for the cache. Or an EAGLE-3
    head for the model."""
    mtp: bool = False
    """The checkpoint's own layer for multi-token prediction guesses, in place of a draft model."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(Precision))
        check_choice("weights", self.weights, get_args(WeightsType))
        check_choice("activations", self.activations, get_args(Activations))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheType))
        check_choice("device", self.device, get_args(Device))
        check_positive(
            self, "threads", "max_model_len", "num_blocks", "kv_cache_memory", "state_interval", optional=True
        )
        check_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_lora_rank")
        if self.max_loras != 0:
            check_positive(self, "max_loras")
