"""Compiling for a device: precisions that it has, threads, and the hints that go with them."""

from __future__ import annotations

import os
from typing import Any

import openvino as ov

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.config import OpenVINOConfig

_CAPABILITY = {"bf16": "BF16", "f16": "FP16", "f32": "FP32"}


def compute_precision(core: ov.Core, config: OpenVINOConfig) -> str:
    """bf16, f16 or f32. Raises UnsupportedError where the device does not compute in the one asked for."""
    has = core.get_property(config.device, "OPTIMIZATION_CAPABILITIES")
    if config.dtype == "auto":
        return "bf16" if "BF16" in has else "f32"
    if config.dtype != "f32" and _CAPABILITY[config.dtype] not in has:
        offered = [name for name, capability in _CAPABILITY.items() if capability in has or name == "f32"]
        raise UnsupportedError(f"dtype={config.dtype} is not offered by {config.device}; it has {', '.join(offered)}")
    return config.dtype


def default_threads() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_decoder(core: ov.Core, model: ov.Model, config: OpenVINOConfig, precision: str) -> Any:
    """The compiled model. Its cache inputs show the layout and type that the device wants."""
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
    }
    if config.device == "CPU":
        properties["INFERENCE_NUM_THREADS"] = config.threads or default_threads()
    return core.compile_model(model, config.device, properties)
