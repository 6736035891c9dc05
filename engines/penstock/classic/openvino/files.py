"""The files of a model, and that none of them lies outside its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.onnxruntime.files import check_external_data
from penstock.classic.openvino import library

FILENAMES = (
    *("model.xml", "model.onnx", "model.pdmodel", "model.savedmodel", "model.graphdef", "model.pb", "model.tflite"),
)
_GRAPHDEF = ".graphdef"


def read_model(config: ModelConfig, version_folder: Path) -> Any:
    """An ov.Model. Raises ValueError when there is none that OpenVINO can read."""
    path = model_path(config, version_folder, *FILENAMES)
    if path.is_dir() and path.suffix == ".onnx":
        path /= "model.onnx"
    if path.suffix == ".onnx":
        check_external_data(path, version_folder)
    try:
        if path.suffix == _GRAPHDEF:
            return _frozen_graph(path)
        return library.core().read_model(str(path))
    except Exception as error:
        raise ValueError(f"'{path.name}' cannot be loaded: {library.explain(error)}") from error


def _frozen_graph(path: Path) -> Any:
    """Triton's name of a frozen graph, whose format OpenVINO does not recognize by it."""
    frontend = library.load().frontend.FrontEndManager().load_by_framework("tf")
    return frontend.convert(frontend.load(str(path)))
