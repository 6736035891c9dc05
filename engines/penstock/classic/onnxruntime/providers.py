"""Execution providers: what an instance's kind and the configuration's accelerators mean to ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.classic.base import InstanceContext
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime.library import load_onnxruntime
from penstock.classic.parameters import choice, strings

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
    found: list[Provider] = []
    if instance.kind == "GPU":
        found += _gpu_providers(config, instance.device_id, accelerators.gpu_execution_accelerator)
    for accelerator in accelerators.cpu_execution_accelerator:
        if accelerator.name != "openvino":
            raise _unknown(accelerator.name)
        found.append((OPENVINO, {"device_type": "CPU"} | dict(accelerator.parameters)))
    found.append((CPU, {}))
    _check_available(found, instance)
    return found


def _gpu_providers(config: ModelConfig, device_id: int, accelerators: Sequence[Any]) -> list[Provider]:
    found: list[Provider] = []
    device = {"device_id": str(device_id)}
    cuda = _deprecated_cuda_options(strings(config))
    for accelerator in accelerators:
        if accelerator.name == "tensorrt":
            found.append((TENSORRT, _tensorrt_options(accelerator.parameters) | device))
        elif accelerator.name == "cuda":
            cuda |= dict(accelerator.parameters)
        else:
            raise _unknown(accelerator.name)
    return [*found, (CUDA, cuda | device)]


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise ValueError(f"unsupported precision mode '{value}' is requested")
            if _PRECISIONS[value]:
                found[_PRECISIONS[value]] = "1"
        elif key in _RENAMED or key.startswith("trt_"):
            found[_RENAMED.get(key, key)] = value
        else:
            raise ValueError(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return found


def _deprecated_cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """CUDA's options as they were given before there was an accelerator called `cuda`."""
    found = {key: parameters[key] for key in ("gpu_mem_limit", "do_copy_in_default_stream") if key in parameters}
    for key, choices in (("cudnn_conv_algo_search", _ALGORITHMS), ("arena_extend_strategy", _STRATEGIES)):
        if key in parameters:
            found[key] = choice(parameters, key, choices)
    return found


def _check_available(wanted: Sequence[Provider], instance: InstanceContext) -> None:
    available = load_onnxruntime().get_available_providers()
    for name, _ in wanted:
        if name not in available:
            kind = " or KIND_CPU in instance_group" if name == CUDA else ""
            raise ValueError(
                f"instance '{instance.name}' (KIND_{instance.kind}) needs the {name}, which the installed onnxruntime"
                f" does not have (it has {', '.join(available)}): install {_PACKAGES[name]} in place of"
                f" onnxruntime{kind and ',' + kind}"
            )


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown Execution Accelerator '{name}' is requested")
