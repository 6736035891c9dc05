"""The files of a model, and that none of them lies outside its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.onnxruntime.files import external_data
from penstock.classic.openvino.library import core, explain

FILENAMES = (
    "model.xml",
    "model.onnx",
    "model.pdmodel",
    "model.savedmodel",
    "model.graphdef",
    "model.pb",
    "model.tflite",
)
_FROZEN_GRAPHS = frozenset({".graphdef", ".pb", ".pbtxt"})


def read_model(config: ModelConfig, version_folder: Path) -> Any:
    """An ov.Model. Raises ValueError when there is none that OpenVINO can read."""
    path = model_path(config, version_folder, *FILENAMES)
    if path.is_dir() and path.suffix == ".onnx":
        path /= "model.onnx"
    if path.suffix == ".onnx":
        external_data(path, version_folder)  # refuses files elsewhere
    try:
        model = core().read_model(str(path))
    except Exception as error:
        raise ValueError(f"'{path.name}' cannot be loaded: {explain(error)}") from error
    if path.suffix in _FROZEN_GRAPHS:
        _call_as_their_operators(model)
    return model


def _call_as_their_operators(model: Any) -> None:
    """Tensors of a graph are called `name:0`, after the operator's first output; configurations write `name`."""
    for port in (*model.inputs, *model.outputs):
        names = port.get_names()
        port.get_tensor().set_names(names | {name.removesuffix(":0") for name in names})
