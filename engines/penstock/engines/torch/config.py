"""Settings of the runner, and the device, precision, threads and memory that they mean."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.host.cores import usable_cores
from penstock.engines.host.memory import available_memory, parse_memory
from penstock.engines.kit.cache_size import check_choice, check_positive

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def choose_device(name: str) -> torch.device:
    """Raises UnsupportedError for a CUDA device that torch does not see."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index or 0
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise UnsupportedError(
                f"device={name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices",
                param="device",
            )
        return torch.device("cuda", index)
    return device


def choose_dtype(config: TorchConfig, stored: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """`stored` is the checkpoint's, f32 where it does not say. Raises UnsupportedError for what the device lacks."""
    named = getattr(torch, stored, stored) if isinstance(stored, str) else stored or torch.float32
    dtype = named if config.dtype == "auto" else DTYPES[config.dtype]
    if dtype not in NAMES:
        raise UnsupportedError(f"the checkpoint's dtype is {dtype}; supported are {', '.join(DTYPES)}", param="dtype")
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} does not compute in bf16; f16 does", param="dtype"
        )
    if config.kv_cache_dtype not in ("auto", NAMES[dtype]):
        raise InvalidRequestError(
            f"kv_cache_dtype={config.kv_cache_dtype} is not the computation's {NAMES[dtype]}, the only one that this "
            "runner keeps keys and values in",
            param="kv_cache_dtype",
        )
    return dtype


def default_threads() -> int:
    """All cores; of more than two one is left to the server."""
    cores = usable_cores()
    return cores if cores <= 2 else cores - 1


def free_memory(device: torch.device) -> int:
    """Bytes of the device that can be taken now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def fresh_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the memory becomes resident when it is written first, in huge pages where there are some:
    torch.zeros writes to all of it, half of the machine's memory for a cache that may never be full."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape)
    fresh = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            fresh.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(fresh, dtype=dtype, count=count).view(shape)


Precision = Literal["auto", "bf16", "f16", "f32"]


@dataclass(frozen=True)
class TorchConfig:
    """Raises InvalidRequestError for a value that is not allowed, naming those that are."""

    model_dir: Path
    dtype: Precision = "auto"
    """Of weights and computation. auto: as in the checkpoint."""
    kv_cache_dtype: Precision = "auto"
    """The precision of the computation, which is what auto means; anything else is an error."""
    device: str = "auto"
    """cpu, cuda or cuda:N. auto: cuda where there is one, else cpu."""
    threads: int | None = None
    """Compute threads on the CPU, of the whole process; None: `device.default_threads`."""
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for. More than that is an error."""
    block_size: int | None = None
    """Tokens of a block; None: 16 on CUDA, 32 on the CPU."""
    num_blocks: int | None = None
    """KV cache blocks; takes precedence over kv_cache_memory."""
    kv_cache_memory: int | str | None = None
    """Bytes of KV cache, or as text (`parse_memory`), a share being of what the device has free once the model is
    loaded. None: a large share of that, no more than max_num_seqs full requests can use."""
    state_interval: int | None = None
    """Tokens between checkpoints of recurrent states, a multiple of the block size. None: by the model's sizes."""
    max_num_seqs: int = 256
    """Requests that live at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step: on CUDA, what a step of that size takes is left free beside the cache. More are computed."""
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    """LoRA adapters that are loaded with the model: their folders by key (`AdapterHost`)."""
    max_loras: int = 0
    """LoRA adapters that may be loaded at the same time; 0: none at all, and nothing is kept free for them."""
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(Precision))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(Precision))
        if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(self.device)) is None:
            raise InvalidRequestError(f"device={self.device!r} is not one of auto, cpu, cuda, cuda:N", param="device")
        check_positive(self, "threads", "max_model_len", "block_size", "num_blocks", "state_interval", optional=True)
        check_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_lora_rank")
        if self.max_loras != 0:
            check_positive(self, "max_loras")
        if self.kv_cache_memory is not None:
            parse_memory(self.kv_cache_memory)
