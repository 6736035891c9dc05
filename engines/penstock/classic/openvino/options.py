"""OpenVINO, imported when the first model needs it, and the parameters of Triton's OpenVINO backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.classic.frameworks import load_package
from penstock.classic.model_config import ModelConfig
from penstock.classic.parameters import choice, flag, instance_count, strings, thread_count
from penstock.engines.host.cores import usable_cores

_PLACES = re.compile(
    r"(?:Exception from |Check '.*' failed at )?\S*src/\S+:\d+:?|FrontEnd API failed.*|Caught exception: "
)
_PATHS = re.compile(r"/[^\s\"']*/")


def load_openvino() -> Any:
    """The module. Raises ValueError that says how to install it."""
    return load_package("openvino", "OpenVINO models", "openvino")


@cache
def core() -> Any:
    """The one of the process: its plugins share their threads."""
    runtime = load_openvino().Core()
    # weights that stay mapped change with the file, and end the process if it becomes shorter
    runtime.set_property({"ENABLE_MMAP": False})
    return runtime


def explain(error: Exception) -> str:
    """A text without the places in OpenVINO's own source, and without folders of this machine."""
    text = _PLACES.sub("", str(error))
    return " ".join(_PATHS.sub("", text).split())[:400] or type(error).__name__


_HINTS = {name: name for name in ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")}
_REFUSED = {
    "CPU_EXTENSION_PATH": "libraries of custom operators are not loaded",
    "COMPILED_CACHE_DIR": "--backend-config=openvino,cache-dir=<folder> keeps compiled models, for all of them",
    "CACHE_DIR": "--backend-config=openvino,cache-dir=<folder> keeps compiled models, for all of them",
}
_EARLIER_NAMES = {
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "ENFORCE_BF16": "HINT_BF16",
    "SKIP_DYNAMIC_BATCHSIZE": "SKIP_OV_DYNAMIC_BATCHSIZE",
}
"""Of Triton's first OpenVINO backend."""


@dataclass(frozen=True, slots=True)
class OpenVINOOptions:
    device: str
    properties: Mapping[str, Any]
    """For compiling."""
    static_batch: bool
    """Every execution has exactly `max_batch_size` inferences."""
    pads: bool
    """Smaller batches are filled up, where they are static."""
    reshapes: bool
    """Inputs get the configured dims."""


def options(config: ModelConfig, backend_options: Mapping[str, str]) -> OpenVINOOptions:
    """Raises ValueError that names what cannot be."""
    values = strings(config)
    for key, reason in _REFUSED.items():
        if key in values:
            raise ValueError(f"parameter '{key}' is not supported: {reason}")
    parameters = {_EARLIER_NAMES.get(key, key): value for key, value in values.items()}
    return OpenVINOOptions(
        device=_device(parameters),
        properties=_properties(parameters, config, backend_options),
        static_batch=config.max_batch_size > 0 and flag(parameters, "SKIP_OV_DYNAMIC_BATCHSIZE", False),
        pads=flag(parameters, "ENABLE_BATCH_PADDING", False),
        reshapes=flag(parameters, "RESHAPE_IO_LAYOUTS", False),
    )


def _device(parameters: Mapping[str, str]) -> str:
    device = parameters.get("TARGET_DEVICE", "CPU").strip().upper()
    kinds = {name.partition(".")[0] for name in core().available_devices} | {"AUTO"}
    if device.partition(".")[0].partition(":")[0] not in kinds:
        raise ValueError(f"parameter 'TARGET_DEVICE' is '{device[:64]}'; this machine has {', '.join(sorted(kinds))}")
    return device


def _properties(
    parameters: Mapping[str, str], config: ModelConfig, backend_options: Mapping[str, str]
) -> dict[str, Any]:
    """One stream for each instance, and the process's cores shared by the streams, where nothing is said."""
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": thread_count(parameters, "INFERENCE_NUM_THREADS") or usable_cores()
    }
    # Pinned threads cannot step aside for the server's other work.
    properties["ENABLE_CPU_PINNING"] = flag(parameters, "CPU_BIND_THREAD", False)
    if "PERFORMANCE_HINT" in parameters:
        properties["PERFORMANCE_HINT"] = choice(parameters, "PERFORMANCE_HINT", _HINTS)
    if "NUM_STREAMS" in parameters:
        properties["NUM_STREAMS"] = _streams(parameters)
    elif "PERFORMANCE_HINT" not in parameters:
        properties["NUM_STREAMS"] = instance_count(config)
    if "COMPILATION_NUM_THREADS" in parameters:
        properties["COMPILATION_NUM_THREADS"] = thread_count(parameters, "COMPILATION_NUM_THREADS")
    # without a word the CPU may take bfloat16 for a model's FP32, and its answers differ from other frameworks'
    properties["INFERENCE_PRECISION_HINT"] = "bf16" if flag(parameters, "HINT_BF16", False) else "f32"
    if folder := backend_options.get("cache-dir"):
        properties["CACHE_DIR"] = folder
    return properties


def _streams(parameters: Mapping[str, str]) -> str | int:
    text = parameters["NUM_STREAMS"].strip().upper()
    return text if text in ("AUTO", "NUMA") else thread_count(parameters, "NUM_STREAMS")
