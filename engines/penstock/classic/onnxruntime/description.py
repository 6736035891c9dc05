"""What ONNX Runtime tells of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.classic.described import DescribedModel, DescribedTensor
from penstock.classic.onnxruntime.files import map_linked
from penstock.classic.onnxruntime.library import explain, load_onnxruntime

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


def describe(session: Any) -> DescribedModel:
    """Tensors of an InferenceSession. Inputs with a value of their own (overridable initializers) are optional."""
    return DescribedModel(
        inputs=tuple(map(_tensor, session.get_inputs())),
        outputs=tuple(map(_tensor, session.get_outputs())),
        optional_inputs=tuple(map(_tensor, session.get_overridable_initializers())),
    )


def describe_file(path: Path, data: Iterable[str]) -> DescribedModel:
    """Of the model in a file with external `data`, opened for nothing else. Raises ValueError when that fails."""
    onnxruntime = load_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    maps = map_linked(path, data, options)
    described = describe(open_session(path, options, [("CPUExecutionProvider", {})]))
    for each in maps:
        each.close()
    return described


def open_session(path: Path, options: Any, providers: list[tuple[str, dict[str, str]]]) -> Any:
    """An InferenceSession that runs on all of `providers`, which must be available. Raises ValueError."""
    onnxruntime = load_onnxruntime()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    except Exception as error:
        _, text = explain(error)
        raise ValueError(f"'{path.name}' cannot be loaded: {text.replace(str(path), path.name)}") from error
    # it goes on without a provider whose libraries it cannot load
    lost = [name for name, _ in providers if name not in session.get_providers()]
    if lost:
        raise ValueError(
            f"onnxruntime could not start its {lost[0]}: the libraries it needs (CUDA, cuDNN, TensorRT, OpenVINO) are"
            " missing, or not of the versions it was built for"
        )
    return session


def _tensor(found: Any) -> DescribedTensor:
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in found.shape)
    return DescribedTensor(found.name, _DATATYPES.get(found.type, found.type), shape)
