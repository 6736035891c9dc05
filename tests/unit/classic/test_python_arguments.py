"""What the functions of triton_python_backend_utils take and refuse: checked against Triton 2.51 and its own tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.classic.python.worker import utils as pb_utils
from penstock.classic.python.worker.wire import Packer, SendArena

TENSOR = pb_utils.Tensor("IN", np.ones(1, np.float32))
COUNTER = pb_utils.MetricFamily.COUNTER
WRONG = pb_utils.TritonModelException


def asking(**changes: Any) -> pb_utils.InferenceRequest:
    """A good request but for these; `...` leaves an argument out."""
    about = {"model_name": "m", "inputs": [TENSOR], "requested_output_names": ["OUT"], **changes}
    return pb_utils.InferenceRequest(**{name: value for name, value in about.items() if value is not ...})


def test_bytes_are_text_wherever_it_is_asked_for() -> None:
    """`as_numpy()[0]` of a BYTES tensor is bytes, and names a model as well as a str does."""
    name = np.array([b"m"], np.object_)[0]
    made = asking(
        model_name=name, requested_output_names=[b"A", "A", bytearray(b"B"), np.bytes_(b"C")], request_id=b"7"
    )
    about, _ = made.pack(Packer(SendArena(-1, 0, 0)))
    assert about[:3] == ["m", -1, "7"]
    assert made.requested_output_names() == {"A", "B", "C"}
    assert pb_utils.Tensor(b"X", np.ones(1)).name() == "X"
    assert pb_utils.Tensor.from_dlpack(b"X", TENSOR).name() == "X"
    assert pb_utils.TritonError(b"why").message() == "why"
    assert pb_utils.TritonError(b"\xff").message() == "�"
    assert pb_utils.MetricFamily(b"c", b"d", COUNTER)._name == "c"


def test_lists_are_any_sequences_and_numbers_any_integers() -> None:
    made = asking(
        inputs=(TENSOR,), requested_output_names=(), flags=True, timeout=np.uint64(3), correlation_id=2**64 - 1
    )
    assert (made.inputs(), made.flags(), made.timeout(), made.correlation_id()) == ([TENSOR], 1, 3, 2**64 - 1)
    assert pb_utils.InferenceResponse((TENSOR,)).output_tensors() == [TENSOR]
    made.set_flags(np.int32(2))
    assert made.flags() == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": ...},
        {"inputs": ...},
        {"requested_output_names": ...},
        *({name: None} for name in ("model_name", "inputs", "requested_output_names", "request_id", "model_version")),
        *({name: None} for name in ("flags", "timeout", "correlation_id", "preferred_memory", "trace")),
        {"model_name": 1},
        {"request_id": 5},
        {"inputs": iter([TENSOR])},
        {"inputs": {TENSOR}},
        {"inputs": TENSOR},
        {"inputs": [1]},
        {"requested_output_names": "OUT"},
        {"requested_output_names": b"OUT"},
        {"requested_output_names": {"OUT"}},
        {"requested_output_names": [None]},
        {"requested_output_names": [1]},
        {"model_version": "1"},
        {"model_version": 1.0},
        {"model_version": 2**63},
        {"flags": -1},
        {"flags": 2**32},
        {"timeout": -1},
        {"preferred_memory": pb_utils.TRITONSERVER_MEMORY_CPU},
        {"trace": 1},
    ],
)
def test_values_of_another_type_and_those_left_out_are_type_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"{next(iter(changes))}|an input|name of an output"):
        asking(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs": [None]}, "Input tensor for request with id '' and model name 'm' should not be empty."),
        ({"requested_output_names": ["", "A"]}, "Requested output name for request with id '' and model name 'm'"),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"correlation_id": b"x"}, "Correlation ID must be integer or string"),
        ({"correlation_id": -1}, "Correlation ID -1"),
        ({"parameters": [("a", 1)]}, "Expect parameters to be a dict"),
        ({"parameters": "{}"}, "Expect parameters to be a dict"),
        ({"parameters": {b"a": 1}}, "Expect parameters keys to have type str"),
        ({"parameters": {"a": b"1"}}, "Expect parameters values"),
    ],
)
def test_what_triton_refuses_itself_is_a_triton_model_exception(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WRONG, match=said):
        asking(**changes)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (WRONG, lambda: pb_utils.InferenceResponse([None])),
        (TypeError, lambda: pb_utils.InferenceResponse(None)),
        (TypeError, lambda: pb_utils.InferenceResponse(TENSOR)),
        (TypeError, lambda: pb_utils.InferenceResponse(each for each in [TENSOR])),
        (TypeError, lambda: pb_utils.InferenceResponse([1])),
        (TypeError, lambda: pb_utils.InferenceResponse(error="why")),
        (TypeError, lambda: pb_utils.TritonError(None)),
        (TypeError, lambda: pb_utils.TritonError(ValueError("why"))),
        (TypeError, lambda: pb_utils.TritonError("why", 3)),
        (TypeError, lambda: pb_utils.TritonError("why", None)),
        (TypeError, lambda: pb_utils.Tensor(None, np.ones(1))),
        (TypeError, lambda: pb_utils.Tensor("", None)),
        (TypeError, lambda: pb_utils.Tensor("X", None)),
        (TypeError, lambda: pb_utils.Tensor("X", [1.0])),
        (WRONG, lambda: pb_utils.Tensor("", np.ones(1))),
        (WRONG, lambda: pb_utils.Tensor.from_dlpack("X", None)),
        (WRONG, lambda: pb_utils.Tensor.from_dlpack("", None)),
        (TypeError, lambda: pb_utils.Logger.log("x", None)),
        (TypeError, lambda: pb_utils.Logger.log("x", 1)),
        (TypeError, lambda: pb_utils.Logger.log(None)),
        (TypeError, lambda: pb_utils.Logger.log_info(None)),
        (TypeError, lambda: pb_utils.Logger.log_warn(3)),
        (TypeError, lambda: pb_utils.Logger.log_error(ValueError("x"))),
        (TypeError, lambda: pb_utils.Logger.log_verbose(None)),
        (TypeError, lambda: pb_utils.PreferredMemory(1)),
        (TypeError, lambda: pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, None)),
        (TypeError, lambda: pb_utils.is_model_ready(None)),
        (TypeError, lambda: pb_utils.is_model_ready("m", 1)),
        (TypeError, lambda: pb_utils.load_model(None)),
        (TypeError, lambda: pb_utils.load_model("m", config=None)),
        (WRONG, lambda: pb_utils.load_model("m", files=[1])),
        (TypeError, lambda: pb_utils.load_model("m", "{}", {"file:1/x": "text"})),
        (TypeError, lambda: pb_utils.load_model("m", "{}", {1: b""})),
        (TypeError, lambda: pb_utils.unload_model(1)),
        (TypeError, lambda: pb_utils.unload_model("m", None)),
        (TypeError, lambda: asking().set_flags(None)),
        (TypeError, lambda: asking().exec(None)),
        (TypeError, lambda: asking().async_exec("x")),
        (TypeError, lambda: pb_utils.MetricFamily(None, "d", COUNTER)),
        (TypeError, lambda: pb_utils.MetricFamily("c", None, COUNTER)),
        (TypeError, lambda: pb_utils.MetricFamily("c", "d", 0)),
        (TypeError, lambda: pb_utils.MetricFamily("c", "d", "COUNTER")),
        (WRONG, lambda: pb_utils.MetricFamily("c", "d", COUNTER).Metric(buckets=[])),
        (WRONG, lambda: pb_utils.MetricFamily("c", "d", COUNTER).Metric(labels=[1])),
        (WRONG, lambda: pb_utils.MetricFamily("c", "d", COUNTER).Metric(labels={"a": b"1"})),
        (WRONG, lambda: pb_utils.MetricFamily("c", "d", pb_utils.MetricFamily.HISTOGRAM).Metric()),
        (WRONG, lambda: pb_utils.MetricFamily("c", "d", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=(1.0,))),
        (WRONG, lambda: pb_utils.MetricFamily("c", "d", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=["x"])),
    ],
)
def test_each_function_refuses_as_triton_does(kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind):
        call()
