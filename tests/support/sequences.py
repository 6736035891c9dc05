"""A repository of models with sequences: those of tests/differential/, and ONNX models with implicit state."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from support.onnx import Shape, model, tensors

MODELS = Path(__file__).parents[1] / "differential/models"
ROW: Shape = ("batch", 1)
LIST: Shape = ("batch", "length")


def write_repository(folder: Path) -> None:
    for name in ("sequence_direct", "sequence_oldest", "sequence_iterative"):
        shutil.copytree(MODELS / name, folder / name)
    write_sums(folder / "onnx_sums")
    _write_lists(folder / "onnx_lists")
    _write_python_state(folder / "python_state")


def write_sums(folder: Path) -> None:
    """SUM: of the inputs of the sequence so far, and 100 from the file of its initial state. READY: the control."""
    nodes = [
        helper.make_node("Mul", ["INPUT", "READY_IN"], ["VALUE"]),
        helper.make_node("Add", ["VALUE", "STATE_IN"], ["SUM"]),
        helper.make_node("Identity", ["SUM"], ["STATE_OUT"]),
        helper.make_node("Identity", ["READY_IN"], ["READY"]),
    ]
    names = ["INPUT", "READY_IN", "STATE_IN"], ["SUM", "STATE_OUT", "READY"]
    made = model(nodes, *(tensors(each, ROW, TensorProto.INT32) for each in names))
    _save(
        folder,
        made,
        """
        max_batch_size: 4
        input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "READY" data_type: TYPE_INT32 dims: [ 1 ] }
        instance_group { count: 2 kind: KIND_CPU }
        sequence_batching {
          max_sequence_idle_microseconds: 60000000
          control_input {
            name: "READY_IN" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }
          }
          state {
            input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ]
            initial_state { name: "hundred" data_type: TYPE_INT32 dims: [ 1 ] data_file: "hundred" }
          }
        }
        """,
    )
    (folder / "initial_state").mkdir()
    (folder / "initial_state/hundred").write_bytes(np.int32(100).tobytes())


def _write_lists(folder: Path) -> None:
    """LIST: a zero and the inputs of the sequence so far, which is its state, too."""
    made = model(
        [helper.make_node("Concat", ["STATE_IN", "INPUT"], ["LIST"], axis=1)],
        [*tensors(["INPUT"], ROW, TensorProto.INT32), *tensors(["STATE_IN"], LIST, TensorProto.INT32)],
        tensors(["LIST"], LIST, TensorProto.INT32),
    )
    _save(
        folder,
        made,
        """
        max_batch_size: 4
        sequence_batching {
          oldest { max_candidate_sequences: 8 }
          state {
            input_name: "STATE_IN" output_name: "LIST" data_type: TYPE_INT32 dims: [ -1 ]
            use_same_buffer_for_input_output: true use_growable_memory: true
          }
        }
        output { name: "LIST" data_type: TYPE_INT32 dims: [ -1 ] }
        input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }
        """,
    )


def _save(folder: Path, made: object, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.onnx").write_bytes(made.SerializeToString())  # type: ignore[attr-defined]
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{config}')


def _write_python_state(folder: Path) -> None:
    """TEXT: the inputs of the sequence so far. Neither it nor its caller keeps them: they are its state."""
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(
        """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text, state, id = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0] for name in ("INPUT", "STATE_IN", "ID")
        )
        if text == b"fail":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("as asked"))
        text = np.array([[state + text]], np.object_)
        outputs = {"TEXT": text, "ID_SEEN": np.array([[id]], np.object_), "STATE_OUT": text}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
"""
    )
    (folder / "config.pbtxt").write_text(
        """
        backend: "python"
        max_batch_size: 4
        input { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] }
        output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
        output { name: "ID_SEEN" data_type: TYPE_STRING dims: [ 1 ] }
        model_warmup {
          name: "one" inputs { key: "INPUT" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
        }
        sequence_batching {
          control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
          state {
            input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_STRING dims: [ 1 ]
            initial_state { name: "empty" data_type: TYPE_STRING dims: [ 1 ] zero_data: true }
          }
        }
        """
    )
