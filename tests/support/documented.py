"""The models that Triton's documentation and its client examples speak of, made again small: tests/documented/.

The files are our own; names, tensors and what a client sees of them are those of the documentation.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from support.onnx import add_sub, model, save, tensors

MODELS = Path(__file__).parents[1] / "documented"
LABELS = ("RED", "GREEN", "BLUE", "GREY")


def write_repository(folder: Path) -> None:
    shutil.copytree(MODELS, folder, dirs_exist_ok=True)
    save(_colours(), folder / "densenet_onnx")
    save(add_sub(data_type=TensorProto.INT32), folder / "simple")
    save(_sums(), folder / "sequence_state")
    save(_ragged_sums(), folder / "ragged_sums")
    (folder / "preprocess_densenet_ensemble/1").mkdir()


def _colours() -> object:
    """Tells which colour an image has most of: a convolution over the mean of its pixels."""
    weights = np.array([[2, -1, -1], [-1, 2, -1], [-1, -1, 2], [0.3, 0.3, 0.3]], np.float32).reshape(4, 3, 1, 1)
    nodes = [
        helper.make_node("GlobalAveragePool", ["data_0"], ["mean"]),
        helper.make_node("Conv", ["mean", "weights"], ["fc6_1"]),
    ]
    return model(
        nodes,
        tensors(["data_0"], [1, 3, 32, 32]),
        tensors(["fc6_1"], [1, 4, 1, 1]),
        initializer=[numpy_helper.from_array(weights, "weights")],
    )


def _sums() -> object:
    """OUTPUT: the sum of a sequence's inputs so far, which is its state. START needs no look: the first state is 0."""
    row = ("batch", 1)
    nodes = [
        helper.make_node("Mul", ["INPUT", "READY"], ["value"]),
        helper.make_node("Mul", ["START", "START"], ["unused"]),
        helper.make_node("Add", ["value", "INPUT_STATE"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["OUTPUT_STATE"]),
    ]
    names = ["INPUT", "START", "READY", "INPUT_STATE"], ["OUTPUT", "OUTPUT_STATE"]
    return model(nodes, *(tensors(each, row, TensorProto.INT32) for each in names))


def _ragged_sums() -> object:
    """OUTPUT: the sum of each request's elements, whose ends INDEX tells."""
    constants = {"zero": [0.0], "axis": 0, "one": [1], "first": [0], "last": [-1], "end": [2**31 - 1]}
    nodes = [
        helper.make_node("CumSum", ["INPUT", "axis"], ["totals"]),
        helper.make_node("Concat", ["zero", "totals"], ["before"], axis=0),
        helper.make_node("Gather", ["before", "INDEX"], ["ends"]),
        helper.make_node("Slice", ["ends", "one", "end"], ["own"]),
        helper.make_node("Slice", ["ends", "first", "last"], ["others"]),
        helper.make_node("Sub", ["own", "others"], ["sums"]),
        helper.make_node("Unsqueeze", ["sums", "one"], ["OUTPUT"]),
    ]
    given = [*tensors(["INPUT"], ["elements"]), *tensors(["INDEX"], ["requests"], TensorProto.INT32)]
    arrays = {name: np.array(value, np.float32 if name == "zero" else np.int64) for name, value in constants.items()}
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return model(nodes, given, tensors(["OUTPUT"], ["batch", 1]), initializer=stored)
