"""ONNX Runtime and the options of its sessions: threads, memory, graph optimisation, execution providers, from a
model's configuration and the backend's options. The package is imported when the first model needs it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.classic.base import InstanceContext
from penstock.classic.frameworks import load_package
from penstock.classic.model_config import ModelConfig
from penstock.classic.parameters import choice, flag, strings, thread_count, threads_per_instance
from penstock.engines.host.cores import usable_cores

INVALID_ARGUMENT = 2
FAIL = 1
_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)
_PLACE = re.compile(r"(?:\S*/onnxruntime/\S+|\w+\.(?:cc|h)):\d+ (?:[\w:<>~&* ]+\([^)]*\)(?: const)? )?")
_INSTALL = "'penstock-server[onnx]', or for NVIDIA GPUs onnxruntime-gpu and onnx"


def load_onnxruntime(module: str = "onnxruntime") -> Any:
    """The module `onnxruntime` (or `onnx`). Raises ValueError that says how to install it."""
    return load_package(module, "ONNX models", _INSTALL)


def explain(error: Exception) -> tuple[int, str]:
    """The code of an ONNX Runtime error (0: it is none) and a text without the places in its own source."""
    match = _ERROR.match(str(error))
    if match is None:
        return 0, f"{type(error).__name__}: {error}"
    code, text = match.groups()
    return int(code), f"onnx runtime error {code}: {_PLACE.sub('', text).strip()}"


_LEVELS = {0: "ORT_ENABLE_ALL", -1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
"""By `optimization.graph.level`."""

_MODES = {"0": "ORT_SEQUENTIAL", "1": "ORT_PARALLEL"}

_DEFAULT_ENTRIES = {
    # Threads that wait for the next operator in a loop take the cores that the server needs to read the next request.
    "session.intra_op.allow_spinning": "0",
    "session.inter_op.allow_spinning": "0",
}

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ERRORS, _NOTHING = 3, 4
"""Severities of ONNX Runtime's own log. What fails in a request is that request's answer and no line on stderr."""

_global_threads = threading.Lock()
_global_sizes: list[tuple[int, int]] = []
"""Of the process's thread pools, once they are made."""


def session_options(config: ModelConfig, backend_options: Mapping[str, str]) -> Any:
    """Of every instance of the model. Raises ValueError that names what cannot be."""
    onnxruntime = load_onnxruntime()
    parameters = strings(config)
    options = onnxruntime.SessionOptions()
    level = config.optimization.graph.level
    if level not in _LEVELS:
        raise ValueError(f"optimization.graph.level must be -1, 0, 1 or 2, not {level}")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[level])
    mode = choice({"execution_mode": "0"} | parameters, "execution_mode", _MODES)
    options.execution_mode = getattr(onnxruntime.ExecutionMode, mode)
    options.enable_cpu_mem_arena = flag(parameters, "enable_mem_arena", True)
    options.enable_mem_pattern = flag(parameters, "enable_mem_pattern", True)
    options.log_severity_level = _ERRORS
    _set_threads(options, config, parameters, backend_options)
    for key, value in _entries(parameters).items():
        options.add_session_config_entry(key, value)
    return options


def run_options(config: ModelConfig) -> Any:
    """Of every execution."""
    options = load_onnxruntime().RunOptions()
    options.log_severity_level = _NOTHING
    parameters = strings(config)
    if _SHRINKAGE in parameters:
        options.add_run_config_entry(_SHRINKAGE, parameters[_SHRINKAGE])
    return options


def _entries(parameters: Mapping[str, str]) -> dict[str, str]:
    """ONNX Runtime's own keys (`session.*`), passed on as they are."""
    entries = _DEFAULT_ENTRIES | {key: value for key, value in parameters.items() if key.startswith("session.")}
    for key in entries:
        if key.endswith(("_path", "_folder_path", "_file")):
            raise ValueError(f"parameter '{key}' is not supported: a model reads the files of its own folder")
    return entries


def _set_threads(
    options: Any, config: ModelConfig, parameters: Mapping[str, str], backend_options: Mapping[str, str]
) -> None:
    if flag(backend_options, "enable-global-threadpool", False):
        _share_threads(backend_options)
        options.use_per_session_threads = False
        return
    # With its default of 0, ONNX Runtime would pin a thread to each core of the machine, whatever share of them this
    # process has, for each instance.
    options.intra_op_num_threads = thread_count(parameters, "intra_op_thread_count") or threads_per_instance(config)
    options.inter_op_num_threads = thread_count(parameters, "inter_op_thread_count")


def _share_threads(backend_options: Mapping[str, str]) -> None:
    """One pool for the operators of all models and one for their graphs. The first model makes them."""
    sizes = (
        thread_count(backend_options, "intra_op_thread_count") or usable_cores(),
        thread_count(backend_options, "inter_op_thread_count") or usable_cores(),
    )
    with _global_threads:
        if not _global_sizes:
            load_onnxruntime().set_global_thread_pool_sizes(*sizes)
            _global_sizes.append(sizes)


Provider = tuple[str, dict[str, str]]

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"

_PACKAGES = {CUDA: "onnxruntime-gpu", TENSORRT: "onnxruntime-gpu and tensorrt", OPENVINO: "onnxruntime-openvino"}
_PRECISIONS = {"FP32": "", "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
"""Triton's names of TensorRT's options, where ONNX Runtime has others."""
_ALGORITHMS = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_STRATEGIES = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}


def providers(config: ModelConfig, instance: InstanceContext) -> list[Provider]:
    """In order of preference; the CPU's is last, for the operators that no other has.

    Raises ValueError that names a provider which this onnxruntime lacks, and what to install for it.
    """
    accelerators = config.optimization.execution_accelerators
    chosen: list[Provider] = []
    if instance.kind == "GPU":
        chosen += _gpu_providers(config, instance.device_id, accelerators.gpu_execution_accelerator)
    for accelerator in accelerators.cpu_execution_accelerator:
        if accelerator.name != "openvino":
            raise _unknown(accelerator.name)
        chosen.append((OPENVINO, {"device_type": "CPU"} | dict(accelerator.parameters)))
    chosen.append((CPU, {}))
    _check_available(chosen, instance)
    return chosen


def _gpu_providers(config: ModelConfig, device_id: int, accelerators: Sequence[Any]) -> list[Provider]:
    chosen: list[Provider] = []
    device = {"device_id": str(device_id)}
    cuda = _deprecated_cuda_options(strings(config))
    for accelerator in accelerators:
        if accelerator.name == "tensorrt":
            chosen.append((TENSORRT, _tensorrt_options(accelerator.parameters) | device))
        elif accelerator.name == "cuda":
            cuda |= dict(accelerator.parameters)
        else:
            raise _unknown(accelerator.name)
    return [*chosen, (CUDA, cuda | device)]


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise ValueError(f"unsupported precision mode '{value}' is requested")
            if _PRECISIONS[value]:
                options[_PRECISIONS[value]] = "1"
        elif key in _RENAMED or key.startswith("trt_"):
            options[_RENAMED.get(key, key)] = value
        else:
            raise ValueError(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return options


def _deprecated_cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """CUDA's options as they were given before there was an accelerator called `cuda`."""
    options = {key: parameters[key] for key in ("gpu_mem_limit", "do_copy_in_default_stream") if key in parameters}
    for key, choices in (("cudnn_conv_algo_search", _ALGORITHMS), ("arena_extend_strategy", _STRATEGIES)):
        if key in parameters:
            options[key] = choice(parameters, key, choices)
    return options


def _check_available(chosen: Sequence[Provider], instance: InstanceContext) -> None:
    available = load_onnxruntime().get_available_providers()
    for name, _ in chosen:
        if name not in available:
            kind = " or KIND_CPU in instance_group" if name == CUDA else ""
            raise ValueError(
                f"instance '{instance.name}' (KIND_{instance.kind}) needs the {name}, which the installed onnxruntime"
                f" does not have (it has {', '.join(available)}): install {_PACKAGES[name]} in place of"
                f" onnxruntime{kind and ',' + kind}"
            )


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown Execution Accelerator '{name}' is requested")
