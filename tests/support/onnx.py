"""Small ONNX models, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto, helper

Shape = Sequence[int | str]
BATCH_OF_16: Shape = ("batch", 16)


def tensors(names: Sequence[str], shape: Shape, data_type: int = TensorProto.FLOAT) -> list[Any]:
    return [helper.make_tensor_value_info(name, data_type, shape) for name in names]


def model(nodes: Sequence[Any], inputs: list[Any], outputs: list[Any], **graph: Any) -> ModelProto:
    # an opset and a format that the oldest onnxruntime we take knows
    made = helper.make_model(
        helper.make_graph(nodes, "graph", inputs, outputs, **graph), opset_imports=[helper.make_opsetid("", 17)]
    )
    made.ir_version = 8
    return made


def add_sub(shape: Shape = BATCH_OF_16, data_type: int = TensorProto.FLOAT) -> ModelProto:
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    return model(
        nodes,
        tensors(["INPUT0", "INPUT1"], shape, data_type),
        tensors(["OUTPUT0", "OUTPUT1"], shape, data_type),
    )


def identity(data_type: int, shape: Shape = ("batch", 2)) -> ModelProto:
    nodes = [helper.make_node("Identity", ["X"], ["Y"])]
    return model(nodes, tensors(["X"], shape, data_type), tensors(["Y"], shape, data_type))


def add_weights(weights: TensorProto, *, overridable: bool = False) -> ModelProto:
    """Y = X + W, both [2] floats."""
    inputs = tensors(["X", "W"] if overridable else ["X"], [2])
    nodes = [helper.make_node("Add", ["X", "W"], ["Y"])]
    return model(nodes, inputs, tensors(["Y"], [2]), initializer=[weights])


def external(name: str, location: str) -> TensorProto:
    """Two floats that lie in the file `location`."""
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "8")):
        entry = made.external_data.add()
        entry.key, entry.value = key, value
    return made


def save(made: ModelProto, model_folder: Path, file: str = "model.onnx") -> Path:
    """In version 1 of the model in `model_folder`; the version's folder."""
    path = model_folder / "1" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made.SerializeToString())
    return model_folder / "1"
