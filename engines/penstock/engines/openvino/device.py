"""Compiling for a device: the precisions that it has, how many threads it gets, what it may remember."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import openvino as ov

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.openvino.config import QUANTIZED, OpenVINOConfig
from penstock.engines.openvino.int8_kernels import rounds_activations
from penstock.engines.openvino.kv_types import KVType
from penstock.engines.openvino.quantization import GROUP

_CAPABILITY = {"bf16": "BF16", "f16": "FP16", "f32": "FP32"}

_WEIGHT_BYTES_PER_THREAD = 32 << 20
"""Reading this much takes a core above a millisecond. With less to do, threads mostly wait for each other: one token of
a model of 10 MB is no faster on two threads, and up to 1.7 times slower where the second core has other work."""

_WORK_PER_THREAD = 12 << 20
"""Bytes of weights times tokens that make one more thread worth waking (7 M and 5 M parameter models, two cores)."""

_MAX_COPIED_BYTES = 256 << 20
"""Larger models are compiled once: each compilation holds its own packed weights."""

_RUNTIME_CACHE = "CPU_RUNTIME_CACHE_CAPACITY"
_PRIMITIVE_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_CACHED_KERNELS = 64
"""How many kernels for shapes that occurred before the plugin and oneDNN each keep. Every length of a prompt is a new
shape: with their own defaults (5,000 and 1,024) a process grows by hundreds of megabytes over some 10,000 requests.
With 16 a prompt takes the place of what decodes need, and the other way round. The environment variables of these names
say otherwise."""
_CACHED_KERNELS_OF_EXPERTS = 512
"""Each expert of a step has another number of rows: with 64, a prompt takes twice as long."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """A number of threads that the model is compiled for, and which batches are computed with it."""

    threads: int
    min_tokens: int
    """Fewest tokens of a batch."""
    in_bf16: bool = False
    """Whatever the precision of the other batches is (`mixed_steps`)."""


def plan_threads(weight_bytes: int, cores: int, threads: int | None, most_tokens: int) -> list[ThreadPlan]:
    """By `min_tokens`, ascending.

    OpenVINO fixes the number of threads when it compiles. A single token of a small model is no faster on two threads
    than on one, but a prompt or a batch is: so a small model is compiled twice, and both work on the same KV cache. Not
    where the number of threads was asked for, or where no batch could have enough of its `most_tokens`.
    """
    if threads is not None:
        return [ThreadPlan(threads, 0)]
    few, many = default_threads(weight_bytes, cores), all_threads(cores)
    plans = [ThreadPlan(few, 0)]
    min_tokens = max(2, -(-many * _WORK_PER_THREAD // weight_bytes))
    if few < many and weight_bytes <= _MAX_COPIED_BYTES and min_tokens <= most_tokens:
        plans.append(ThreadPlan(many, min_tokens))
    return plans


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


def settle_dtype(core: ov.Core, config: OpenVINOConfig, *, all_integers: bool) -> OpenVINOConfig:
    """Activations in int8 decide what dtype=auto is, where they do not go with bf16: if they are asked for, or if
    `all_integers`, every matrix of the decoder is in 8 or 4 bits. Keys and values are f16 then: as many bytes as bf16.

    With AMX a step of 4 requests takes half as long as in bf16, one of 16 two thirds, one of 64 as long; prompts take
    1.4 times as long.
    """
    if config.dtype != "auto" or not (
        config.activations == "int8"
        or (config.activations == "auto" and all_integers and rounds_activations(config.device, "f32"))
    ):
        return config
    has = core.get_property(config.device, "OPTIMIZATION_CAPABILITIES")
    if "BF16" not in has or rounds_activations(config.device, "bf16"):
        return config
    return replace(
        config, dtype="f32", kv_cache_dtype="f16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    )


def activation_type(config: OpenVINOConfig, precision: str, quantized: bool) -> str:
    """What is multiplied by the weights: int8, or the precision of the computation. `quantized`: whether matrices are
    in 8 or 4 bits.

    With weights in 8 or 4 bits, activations in int8 halve the time of a step: unpacking the weights to floats instead
    takes longer than reading twice as many bytes of bf16. Raises InvalidRequestError for a type that does not go with
    the others, UnsupportedError for int8 where the device does not multiply that way.
    """
    allowed = ("int8", precision) if quantized else (precision,)
    if config.activations == "auto":
        return "int8" if quantized and rounds_activations(config.device, precision) else precision
    if config.activations not in allowed:
        raise InvalidRequestError(
            f"activations={config.activations} does not go with weights={config.weights} and dtype={precision}; "
            f"{' and '.join(allowed)} {'do' if quantized else 'does'}",
            param="activations",
        )
    if config.activations == "int8" and not rounds_activations(config.device, precision):
        other = "int8 with dtype=f32, or " if rounds_activations(config.device, "f32") else ""
        raise UnsupportedError(
            f"activations=int8 is not offered by this {config.device} with dtype={precision}; {other}{precision} is",
            param="activations",
        )
    return config.activations


def default_threads(weight_bytes: int, cores: int) -> int:
    """One thread for each 32 MiB of weights, on at most all `cores`; of more than two one is left to the server.

    A compute thread that has to share its core holds up all the others at every layer.
    """
    return max(1, min(all_threads(cores), weight_bytes // _WEIGHT_BYTES_PER_THREAD))


def all_threads(cores: int) -> int:
    """As many as a step may use at most."""
    return cores if cores <= 2 else cores - 1


def compile_decoder(
    core: ov.Core,
    model: ov.Model,
    config: OpenVINOConfig,
    precision: str,
    kv_type: KVType,
    plan: ThreadPlan,
    activations: str | None,
    experts: bool,
) -> Any:
    """The compiled model. Its cache inputs show the layout that the device wants. `activations`: what weights in 8 and
    4 bits are multiplied with; None: there are none. `experts`: it has some."""
    kernels = _cached_kernels(_CACHED_KERNELS_OF_EXPERTS if experts else _CACHED_KERNELS)
    if plan.in_bf16:
        precision = activations = "bf16"
    more = {**kv_type.properties, _RUNTIME_CACHE: kernels, **_dynamic_quantization(activations)}
    return _compile(core, model, config, precision, plan.threads, more)


def compile_encoder(core: ov.Core, model: ov.Model, config: OpenVINOConfig, precision: str, threads: int) -> Any:
    """The compiled model. Raises as `activation_type` does."""
    quantized = config.weights in QUANTIZED
    activations = activation_type(config, precision, quantized)
    more = {
        _RUNTIME_CACHE: _cached_kernels(_CACHED_KERNELS),
        **_dynamic_quantization(activations if quantized else None),
    }
    return _compile(core, model, config, precision, threads, more)


def _dynamic_quantization(activations: str | None) -> dict[str, Any]:
    return {} if activations is None else {"DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP if activations == "int8" else 0}


def _compile(
    core: ov.Core, model: ov.Model, config: OpenVINOConfig, precision: str, threads: int, more: dict[str, Any]
) -> Any:
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        # Pinned threads cannot step aside for the server's other processes: a step took up to 1.8 times as long.
        "ENABLE_CPU_PINNING": False,
        # One batch computes at a time: the infer requests share one stream and its working memory.
        "NUM_STREAMS": 1,
        **more,
    }
    try:
        return core.compile_model(model, config.device, properties)
    except RuntimeError as e:
        raise UnsupportedError(f"OpenVINO does not compile the model for {config.device}: {_last_line(e)}") from e


def _cached_kernels(default: int) -> int:
    """An operator's environment variables take precedence. Raises InvalidRequestError for one that is no number."""
    for name in (_RUNTIME_CACHE, _PRIMITIVE_CACHE):
        value = os.environ.setdefault(name, str(default))  # oneDNN reads its own when it makes its first kernel
        if not value.isdecimal():
            raise InvalidRequestError(f"the environment variable {name}={value!r} is not a number of kernels")
    return int(os.environ[_RUNTIME_CACHE])


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
