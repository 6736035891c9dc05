"""Responses as flat objects with sorted keys, and as events."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import NUMPY_TYPES, Tensor
from penstock.engines.errors import EngineError
from penstock.gateway.apis.kserve.generate import Renderer


def renderer(request_id: str = "") -> Renderer:
    return Renderer("m", 3, InferRequest(inputs={}, id=request_id))


def tensor(name: str, datatype: str, values: Any) -> Tensor:
    array = np.array(values, NUMPY_TYPES[datatype])
    return Tensor(name, datatype, array)


def words(name: str, *values: bytes) -> Tensor:
    return tensor(name, "BYTES", list(values))


def value(given: Tensor) -> Any:
    return json.loads(renderer().body(InferResponse([given])))[given.name]


def test_an_object_is_what_triton_gives() -> None:
    """Measured on Triton 2.51."""
    response = InferResponse([words("text_output", b"a"), tensor("F", "FP32", [1.5])])
    assert renderer("7").frames([response]) == (
        b'data: {"F":1.5,"id":"7","model_name":"m","model_version":"3","text_output":"a"}\n\n'
    )
    assert renderer().body(response) == b'{"F":1.5,"model_name":"m","model_version":"3","text_output":"a"}'


def test_every_key_finds_its_place() -> None:
    outputs = [words(name, name.encode()) for name in ("zz", "a", "model", "model_name2", "id", "é", 'q"')]
    body = renderer("1").body(InferResponse(outputs))
    found = json.loads(body)
    assert list(found) == sorted(found)
    assert found == {
        "a": "a",
        "id": "id",
        "model": "model",
        "model_name": "m",
        "model_name2": "model_name2",
        "model_version": "3",
        'q"': 'q"',
        "zz": "zz",
        "é": "é",
    }


def test_response_parameters_are_fields() -> None:
    response = InferResponse([words("b", b"x")], {"a": 1, "z": True, "n": "s", "f": 0.5})
    assert renderer().body(response) == (
        b'{"a":1,"b":"x","f":0.5,"model_name":"m","model_version":"3","n":"s","z":true}'
    )


def test_responses_may_differ_within_a_stream() -> None:
    frames = renderer().frames
    first = frames([InferResponse([words("a", b"1")]), InferResponse([words("a", b"2"), words("b", b"3")])])
    assert first == (
        b'data: {"a":"1","model_name":"m","model_version":"3"}\n\n'
        b'data: {"a":"2","b":"3","model_name":"m","model_version":"3"}\n\n'
    )
    assert frames([InferResponse([])]) == b'data: {"model_name":"m","model_version":"3"}\n\n'
    assert frames([InferResponse([words("a", b"4")])]) == b'data: {"a":"4","model_name":"m","model_version":"3"}\n\n'


def test_a_bare_final_flag_shows_nothing() -> None:
    assert renderer().frames([InferResponse(None)]) == b""
    assert renderer().frames([]) == b""


def test_errors_are_events() -> None:
    assert renderer().frames([InferResponse(None, error=EngineError('bad\n"thing"'))]) == (
        b'data: {"error":"bad\\n\\"thing\\""}\n\n'
    )
    long = renderer().frames([InferResponse(None, error=EngineError("x" * 10_000))])
    assert len(long) < 1000


@pytest.mark.parametrize(
    ("datatype", "values", "shown"),
    [
        ("BOOL", [True], True),
        ("BOOL", [True, False], [True, False]),
        ("UINT64", [2**64 - 1], 2**64 - 1),
        ("INT8", [[1, 2], [3, 4]], [1, 2, 3, 4]),
        ("FP16", [0.5], 0.5),
        ("FP16", [0.5, 2], [0.5, 2.0]),
        ("BF16", [1.5], 1.5),
        ("FP32", [0.1, 1e30], [0.10000000149011612, 1.0000000150474662e30]),
        ("FP64", [], []),
        ("FP32", [float("nan"), float("inf"), 1], [None, None, 1.0]),
        ("BYTES", [], []),
        ("BYTES", [b"a", b"\xff\xfe", "text"], ["a", "\ufffd\ufffd", "text"]),
        ("BYTES", [[b'\0\n"']], '\0\n"'),
    ],
)
def test_values_are_json_and_one_alone_is_no_list(datatype: str, values: Any, shown: Any) -> None:
    assert value(tensor("X", datatype, values)) == shown


def test_a_scalar_without_dimensions() -> None:
    assert value(Tensor("X", "INT32", np.array(5, np.int32))) == 5
    assert value(Tensor("X", "BF16", np.array(2, ml_dtypes.bfloat16))) == 2.0
