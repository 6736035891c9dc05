"""Models that take requests of different shapes in one batch, and a model that says with whom it was executed."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto, TensorProto, helper

from support.onnx import model, save, tensors

CONFIG = """
backend: "onnxruntime" max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [
  { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "LONGEST" data_type: TYPE_INT64 dims: [ 1 ] }
]
batch_input [
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "INPUT" },
  { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "WIDTH" data_type: TYPE_FP32 source_input: "INPUT" }
]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "DOUBLED" source_input: "INPUT" } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 30000000 }
"""
"""With four requests of one row a batch is complete; a test never waits for the delay."""


def sums() -> ModelProto:
    """DOUBLED is INPUT twice, SUM the sum of each request of one row, LONGEST the elements of the longest request."""
    constants = [
        helper.make_tensor("one", TensorProto.INT32, [1], [1]),
        helper.make_tensor("first_axis", TensorProto.INT64, [1], [0]),
        helper.make_tensor("second_axis", TensorProto.INT64, [1], [1]),
        helper.make_tensor("axis", TensorProto.INT64, [], [0]),
        helper.make_tensor("all_but_last", TensorProto.INT64, [1], [-1]),
        helper.make_tensor("zero", TensorProto.FLOAT, [1], [0]),
    ]
    nodes = [
        helper.make_node("Add", ["INPUT", "INPUT"], ["DOUBLED"]),
        helper.make_node("CumSum", ["INPUT", "axis"], ["running"]),
        helper.make_node("Sub", ["ENDS", "one"], ["last"]),
        helper.make_node("Gather", ["running", "last"], ["at_end"]),
        helper.make_node("Slice", ["at_end", "first_axis", "all_but_last"], ["before"]),
        helper.make_node("Concat", ["zero", "before"], ["at_start"], axis=0),
        helper.make_node("Sub", ["at_end", "at_start"], ["sums"]),
        helper.make_node("Unsqueeze", ["sums", "second_axis"], ["SUM"]),
        helper.make_node("Shape", ["WIDTH"], ["longest"]),
        helper.make_node("Shape", ["SUM"], ["rows"]),
        helper.make_node("Expand", ["longest", "rows"], ["LONGEST"]),
    ]
    inputs = [*tensors(["INPUT"], ["n"]), *tensors(["ENDS"], ["b"], TensorProto.INT32), *tensors(["WIDTH"], ["w"])]
    outputs = [
        *tensors(["DOUBLED"], ["n"]),
        *tensors(["SUM"], ["b", 1]),
        *tensors(["LONGEST"], ["b", 1], TensorProto.INT64),
    ]
    return model(nodes, inputs, outputs, initializer=constants)


def write_sums(repository: Path, name: str = "sums") -> Path:
    """The version's folder."""
    version = save(sums(), repository / name)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    return version
