from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from backend_candidates.candidate import (
    HEAVY_ROWS,
    LOOKUP,
    MAX_BATCH_SIZE,
    STRINGS,
    TABLE_ROWS,
    Candidate,
    Extra,
    beyond_the_table,
    lookup_answer,
    lookup_rows,
    table,
)
from support.onnx import model, tensors


def lookup_model(number: int, rows: int = TABLE_ROWS) -> ModelProto:
    constants = {"number": np.float32(number), "table": table(rows), "last": np.array([1])}
    nodes = [
        helper.make_node("Squeeze", ["INDEX", "last"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["row"]),
        helper.make_node("Mul", ["INPUT0", "number"], ["times"]),
        helper.make_node("Add", ["times", "row"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "row"], ["OUTPUT1"]),
    ]
    inputs = [*tensors(["INPUT0"], ("batch", 4)), *tensors(["INDEX"], ("batch", 1), TensorProto.INT64)]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    return model(nodes, inputs, tensors(["OUTPUT0", "OUTPUT1"], ("batch", 4)), initializer=weights)


def _strings() -> ModelProto:
    nodes = [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])]
    shape = ("batch", 2)
    return model(nodes, tensors(["INPUT0"], shape, TensorProto.STRING), tensors(["OUTPUT0"], shape, TensorProto.STRING))


def write_onnx(folder: Path, made: ModelProto) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(made.SerializeToString())


CANDIDATE = Candidate(
    backend="onnxruntime",
    write=lambda folder, number: write_onnx(folder, lookup_model(number)),
    config=LOOKUP,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lookup_rows,
    expect=lookup_answer,
    poison=beyond_the_table,
    write_heavy=lambda folder: write_onnx(folder, lookup_model(1, HEAVY_ROWS)),
    write_broken=lambda folder: (folder / "model.onnx").write_bytes(b"no model") and None,
    strings=Extra(write=lambda folder: write_onnx(folder, _strings()), config=STRINGS),
)
