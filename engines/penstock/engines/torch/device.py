"""Where the model runs: the device, its precision, its threads, and the memory that it has."""

from __future__ import annotations

import torch

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.host.cores import usable_cores
from penstock.engines.host.memory import available_memory
from penstock.engines.torch.config import TorchConfig

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
