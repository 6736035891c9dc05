"""Compiling for a device: the precisions that it has, and how many threads it gets."""

from __future__ import annotations

from typing import Any

import openvino as ov

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.openvino.config import OpenVINOConfig

_CAPABILITY = {"bf16": "BF16", "f16": "FP16", "f32": "FP32"}

_KV_TYPES = {"bf16": ("bf16", "u8"), "f16": ("f16", "u8"), "f32": ("f32", "f16", "u8")}
"""Cache types that the CPU's attention kernels take, by precision of the computation; the first is the default."""

_WEIGHT_BYTES_PER_THREAD = 32 << 20
"""Reading this much takes a core above a millisecond. With less to do, threads mostly wait for each other: one token of
a model of 10 MB is no faster on two threads, and up to 1.7 times slower where the second core has other work."""

_ACTIVATION_GROUP = 128
"""With int8 weights: activations in a group share a scale and are multiplied as int8. That halves the time of a step;
unpacking the weights to floats instead takes longer than reading twice as many bytes of bf16."""


def compute_precision(core: ov.Core, config: OpenVINOConfig) -> str:
    """bf16, f16 or f32. Raises UnsupportedError where the device does not compute in the one asked for."""
    has = core.get_property(config.device, "OPTIMIZATION_CAPABILITIES")
    if config.dtype == "auto":
        return "bf16" if "BF16" in has else "f32"
    if config.dtype != "f32" and _CAPABILITY[config.dtype] not in has:
        offered = [name for name, capability in _CAPABILITY.items() if capability in has or name == "f32"]
        raise UnsupportedError(
            f"dtype={config.dtype} is not offered by {config.device}; it has {', '.join(offered)}", param="dtype"
        )
    return config.dtype


def kv_cache_type(config: OpenVINOConfig, precision: str) -> str:
    """Raises InvalidRequestError for a type that does not go with the precision of the computation."""
    allowed = _KV_TYPES[precision]
    if config.kv_cache_dtype == "auto":
        return allowed[0]
    if config.kv_cache_dtype not in allowed:
        raise InvalidRequestError(
            f"kv_cache_dtype={config.kv_cache_dtype} does not go with dtype={precision}; {', '.join(allowed)} do",
            param="kv_cache_dtype",
        )
    return config.kv_cache_dtype


def default_threads(weight_bytes: int, cores: int) -> int:
    """One thread for each 32 MiB of weights, on at most all `cores`; of more than two one is left to the server.

    A compute thread that has to share its core holds up all the others at every layer.
    """
    return max(1, min(all_threads(cores), weight_bytes // _WEIGHT_BYTES_PER_THREAD))


def all_threads(cores: int) -> int:
    """As many as a step may use at most."""
    return cores if cores <= 2 else cores - 1


def compile_decoder(
    core: ov.Core, model: ov.Model, config: OpenVINOConfig, precision: str, kv_type: str, threads: int
) -> Any:
    """The compiled model. Its cache inputs show the layout that the device wants."""
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": kv_type,
        "INFERENCE_NUM_THREADS": threads,
        # Pinned threads cannot step aside for the server's other processes: a step took up to 1.8 times as long.
        "ENABLE_CPU_PINNING": False,
    }
    if config.weights == "int8":
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _ACTIVATION_GROUP
    try:
        return core.compile_model(model, config.device, properties)
    except RuntimeError as e:
        raise UnsupportedError(f"OpenVINO does not compile the model for {config.device}: {_last_line(e)}") from e


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
