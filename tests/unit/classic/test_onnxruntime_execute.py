"""The onnxruntime backend: numbers, types, and what of a batch is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from penstock.classic.base import BackendInstance
from penstock.classic.frameworks import DescribedModel
from penstock.classic.onnxruntime.backend import OnnxRuntimeBackend, OnnxRuntimeInstance
from penstock.engines.errors import InvalidRequestError
from support.backends import RecordedBatch, RecordedCall, load, model_config, run
from support.onnx import add_sub, add_weights, identity, model, save, tensors


def loaded(folder: Path, config: str = "") -> BackendInstance:
    return load(OnnxRuntimeBackend({}), model_config(config), folder)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random(shape, np.float32)


def test_a_batch_is_computed_as_one(tmp_path: Path) -> None:
    instance = loaded(save(add_sub(), tmp_path / "m"))
    first, second = ({"INPUT0": floats(rows, 16), "INPUT1": floats(rows, 16) * 2} for rows in (1, 3))
    batch = RecordedBatch(RecordedCall(first), RecordedCall(second))
    instance.execute(batch)
    left, right = (np.concatenate([first[name], second[name]]) for name in ("INPUT0", "INPUT1"))
    np.testing.assert_array_equal(batch.outputs["OUTPUT0"], left + right)
    np.testing.assert_array_equal(batch.outputs["OUTPUT1"], left - right)


def test_what_was_read_from_the_network_is_taken_as_it_is(tmp_path: Path) -> None:
    instance = loaded(save(add_sub(), tmp_path / "m"))
    array = np.frombuffer(floats(2, 16).tobytes(), np.float32).reshape(2, 16)
    np.testing.assert_array_equal(run(instance, INPUT0=array, INPUT1=array)["OUTPUT0"], array + array)


@pytest.mark.parametrize(
    ("asked", "computed"),
    [
        ([(), ("OUTPUT1",)], ["OUTPUT0", "OUTPUT1"]),
        ([("OUTPUT1",), ("OUTPUT1",)], ["OUTPUT1"]),
        ([("OUTPUT1",), ("OUTPUT0",)], ["OUTPUT0", "OUTPUT1"]),
    ],
)
def test_only_outputs_that_are_asked_for_are_computed(
    tmp_path: Path, asked: list[tuple[str, ...]], computed: list[str]
) -> None:
    instance = loaded(save(add_sub(), tmp_path / "m"))
    arrays = {"INPUT0": floats(1, 16), "INPUT1": floats(1, 16)}
    batch = RecordedBatch(*(RecordedCall(arrays, outputs) for outputs in asked))
    instance.execute(batch)
    assert list(batch.outputs) == computed


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [
        (TensorProto.FLOAT16, np.float16),
        (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
        (TensorProto.DOUBLE, np.float64),
        (TensorProto.INT64, np.int64),
        (TensorProto.UINT8, np.uint8),
        (TensorProto.BOOL, np.bool_),
    ],
)
def test_types_come_back_as_they_went_in(tmp_path: Path, data_type: int, dtype: Any) -> None:
    instance = loaded(save(identity(data_type), tmp_path / "m"))
    array = np.array([[0, 1], [1, 3]]).astype(dtype)
    found = run(instance, X=array)["Y"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_an_empty_bfloat16_batch(tmp_path: Path) -> None:
    instance = loaded(save(identity(TensorProto.BFLOAT16, ("b", "n")), tmp_path / "m"))
    assert run(instance, X=np.empty((2, 0), ml_dtypes.bfloat16))["Y"].shape == (2, 0)


def test_bytes_are_text_to_the_model(tmp_path: Path) -> None:
    instance = loaded(save(identity(TensorProto.STRING), tmp_path / "m"))
    array = np.array([[b"caf\xc3\xa9", b""], [b"a\0b", b"plain"]], np.object_)
    found = run(instance, X=array)["Y"]
    assert found.dtype == np.object_
    assert found.tolist() == array.tolist()


def test_bytes_that_are_no_text_are_the_callers_fault(tmp_path: Path) -> None:
    instance = loaded(save(identity(TensorProto.STRING), tmp_path / "m"))
    with pytest.raises(InvalidRequestError, match="input 'X' has a string that is not UTF-8 at byte 1"):
        run(instance, X=np.array([[b"ok", b"a\xff"]], np.object_))


def test_a_scalar_is_written_as_one_element(tmp_path: Path) -> None:
    config = model_config()
    instance = load(OnnxRuntimeBackend({}), config, save(identity(TensorProto.FLOAT, ()), tmp_path / "m"))
    assert list(config.input[0].dims) == [1]
    found = run(instance, X=np.array([3], np.float32))["Y"]
    assert (found.shape, found.item()) == ((1,), 3)


def test_an_optional_input_may_be_left_out(tmp_path: Path) -> None:
    weights = helper.make_tensor("W", TensorProto.FLOAT, [2], [10, 20])
    text = """
      input { name: "X" data_type: TYPE_FP32 dims: 2 }
      input { name: "W" data_type: TYPE_FP32 dims: 2 optional: true }
      output { name: "Y" data_type: TYPE_FP32 dims: 2 }"""
    instance = loaded(save(add_weights(weights, overridable=True), tmp_path / "m"), text)
    array = np.array([1, 2], np.float32)
    assert run(instance, X=array)["Y"].tolist() == [11, 22]
    assert run(instance, X=array, W=array)["Y"].tolist() == [2, 4]


def test_an_operator_that_fails_names_no_file_of_the_runtime(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = helper.make_node("Add", ["A", "B"], ["C"])
    made = model([node], [*tensors(["A"], ["a"]), *tensors(["B"], ["b"])], tensors(["C"], ["c"]))
    config = 'input { name: "A" data_type: TYPE_FP32 dims: -1 } input { name: "B" data_type: TYPE_FP32 dims: -1 }'
    config += 'output { name: "C" data_type: TYPE_FP32 dims: -1 }'
    instance = loaded(save(made, tmp_path / "m"), config)
    with pytest.raises(InvalidRequestError, match=r"onnx runtime error 1: .*Add.*2 by 3") as caught:
        run(instance, A=floats(2), B=floats(3))
    assert "/" not in caught.value.message
    assert capfd.readouterr().err == "", "a request's mistake is no line in the server's log"


def test_ranks_that_the_model_does_not_take_are_the_callers_fault(tmp_path: Path) -> None:
    instance = loaded(save(add_sub(), tmp_path / "m"))
    with pytest.raises(InvalidRequestError, match="onnx runtime error 2: Invalid rank for input: INPUT"):
        run(instance, INPUT0=floats(16), INPUT1=floats(16))


@pytest.mark.parametrize(("on_cpu", "fault"), [(True, "invalid_request"), (False, "engine_error")])
def test_a_failing_operator_on_a_gpu_may_be_the_gpu(on_cpu: bool, fault: str) -> None:
    class Session:
        def run(self, names: object, feed: object, options: object) -> None:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory")

    instance = OnnxRuntimeInstance(Session(), model_config(), DescribedModel((), ()), on_cpu=on_cpu)
    with pytest.raises(Exception, match="out of memory") as caught:
        run(instance, X=floats(1))
    assert getattr(caught.value, "code", None) == fault
