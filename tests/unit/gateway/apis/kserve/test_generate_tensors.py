"""JSON objects to requests: which keys are tensors, in what shape, and what is refused."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.generate import read_generate
from penstock.gateway.requests.bounded_json import has_all_members
from support.kserve import tensor_config


def signature(*inputs: tuple[str, str, list[int]], max_batch_size: int = 0) -> ModelSignature:
    text = " ".join(f"input {tensor_config(*each)}" for each in inputs)
    config = text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())
    return ModelSignature(config)


TEXT = signature(("text_input", "BYTES", [1]), ("stream", "BOOL", [1]))


def read(body: dict[str, Any], model: ModelSignature = TEXT) -> InferRequest:
    return read_generate(json.dumps(body).encode(), model)


def tensor(value: object, datatype: str, dims: list[int], max_batch_size: int = 0) -> np.ndarray[Any, Any]:
    found = read({"X": value}, signature(("X", datatype, dims), max_batch_size=max_batch_size)).inputs["X"]
    assert (found.name, found.datatype) == ("X", datatype)
    return found.array


def test_inputs_are_tensors_and_the_rest_are_parameters() -> None:
    request = read({"text_input": "hi", "temperature": 0.5, "id": "7", "parameters": {"stream": True, "a": "b"}})
    assert request.id == "7"
    assert {name: each.array.tolist() for name, each in request.inputs.items()} == {
        "text_input": [b"hi"],
        "stream": [True],
    }
    assert request.parameters == {"temperature": 0.5, "a": "b"}


def test_reserved_parameters_become_fields() -> None:
    request = read({"text_input": "hi", "priority": 3, "parameters": {"timeout": 10, "sequence_id": 4}})
    assert (request.priority, request.timeout_us, request.correlation_id, request.parameters) == (3, 10, 4, {})


def test_text_is_utf_8() -> None:
    assert read({"text_input": "é\0"}).inputs["text_input"].array[0] == "é\0".encode()


@pytest.mark.parametrize(
    ("count", "dims", "max_batch_size", "shape"),
    [
        (1, [1], 0, (1,)),
        (4, [4], 0, (4,)),
        (0, [-1], 0, (0,)),
        (3, [-1], 0, (3,)),
        (4, [-1, 2, -1], 0, (1, 2, 2)),
        (6, [2, -1], 0, (2, 3)),
        (6, [-1, 3], 0, (2, 3)),
        (1, [1], 8, (1, 1)),
        (4, [2], 8, (2, 2)),
        (5, [-1], 8, (1, 5)),
        (1, [], 0, ()),
        (3, [], 8, (3,)),
        (0, [0], 0, (0,)),
        (0, [0, -1], 0, (0, 1)),
    ],
)
def test_a_shape_is_made_of_the_count_and_the_model_s_dimensions(
    count: int, dims: list[int], max_batch_size: int, shape: tuple[int, ...]
) -> None:
    assert tensor([1] * count, "FP32", dims, max_batch_size).shape == shape


@pytest.mark.parametrize(
    ("count", "dims", "max_batch_size"),
    [(2, [1], 0), (0, [1], 0), (3, [-1, 2, -1], 0), (3, [2], 8), (1, [2**40, 2**40], 0), (1, [0], 0), (1, [0, -1], 0)],
)
def test_counts_that_fit_no_shape(count: int, dims: list[int], max_batch_size: int) -> None:
    with pytest.raises(InvalidRequestError, match="The schema can not convert input 'X' to tensor with proper shape"):
        tensor([1] * count, "FP32", dims, max_batch_size)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 2**16 - 1]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("INT16", [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FP16", [-0.5, 65504]),
        ("BF16", [-0.5, 256]),
        ("FP32", [-0.5, 1]),
        ("FP64", [-1e300, 1]),
    ],
)
def test_values_of_every_datatype(datatype: str, values: list[Any]) -> None:
    assert [type(values[0])(item) for item in tensor(values, datatype, [-1])] == values
    assert tensor(values[0], datatype, [1]).size == 1


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("BOOL", 1),
        ("BOOL", "true"),
        ("UINT8", 256),
        ("UINT8", -1),
        ("INT8", 300),
        ("INT8", 1.0),
        ("INT8", "1"),
        ("INT8", True),
        ("INT64", 2**63),
        ("INT64", 2**64),
        ("UINT64", -1),
        ("FP16", 65536.0),
        ("BF16", 3.4e38),
        ("FP32", 1e39),
        ("FP32", True),
        ("FP32", "1"),
        ("FP32", 10**400),
        ("BYTES", 5),
        ("BYTES", None),
        ("FP32", None),
        ("FP32", {}),
        ("BYTES", ["a", 1]),
    ],
)
def test_values_that_do_not_fit(datatype: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="input 'X'"):
        tensor(value, datatype, [-1])


@given(st.lists(st.text(alphabet='a"\\[],é\n'), min_size=1, max_size=5))
def test_text_of_any_kind_is_counted_and_kept(values: list[str]) -> None:
    assert tensor(values, "BYTES", [-1]).tolist() == [value.encode() for value in values]


def test_how_arrays_are_nested_does_not_matter() -> None:
    assert tensor([[1, 2], [3, 4]], "INT8", [-1]).tolist() == [1, 2, 3, 4]
    assert tensor([[]], "INT8", [-1]).tolist() == []
    assert tensor([["a,b", '["'], ["\\"]], "BYTES", [3]).tolist() == [b"a,b", b'["', b"\\"]


@given(st.lists(st.integers(-1, 3), max_size=4), st.integers(0, 40), st.booleans())
def test_every_shape_holds_all_elements(dims: list[int], count: int, batched: bool) -> None:
    try:
        found = tensor([1] * count, "UINT8", dims, 8 if batched else 0)
    except InvalidRequestError:
        return
    assert found.size == count
    shape = found.shape[1:] if batched else found.shape
    assert all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"a": None}, "parameter 'a' must be"),
        ({"a": [1]}, "parameter 'a' must be"),
        ({"a": {"b": 1}}, "parameter 'a' must be"),
        ({"parameters": {"a": []}}, "parameter 'a' must be"),
        ({"parameters": {"parameters": {}}}, "parameter 'parameters' must be"),
        ({"parameters": 5}, "Expected JSON object for keyword: 'parameters'"),
        ({"id": 5}, "Unable to parse 'id'"),
        ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved"),
        ({"parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are reserved"),
        ({"headers": "x"}, "reserved"),
        ({"priority": -1}, "parameter 'priority' must be"),
        ({"big": 2**64}, "does not fit into 64 bits"),
        ({"text_input": "a", "parameters": {"text_input": "b"}}, "input 'text_input' already exists in request"),
    ],
)
def test_bodies_that_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        read(body)


def test_an_input_called_parameters_excludes_the_nested_schema() -> None:
    model = signature(("parameters", "FP32", [2]))
    with pytest.raises(
        InvalidRequestError, match="Keyword 'parameters' for nested schema also given as input tensor name"
    ):
        read({"parameters": [1, 2]}, model)


def test_arrays_that_are_no_inputs_are_refused_before_they_are_decoded() -> None:
    body = b'{"a":[' + b"[]," * 200_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="parameter 'a' must be"):
            read_generate(body, TEXT)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"x":1,"x":2}', "input 'x' already exists in request"),
        ('{"x":1, "\\u0078" : 2}', "a key stands more than once in the request"),
        ('{"x":1,"p":":","p":[{"q":1},{"q":2}]}', "a key stands more than once in the request"),
        ('{"x":1,"id":"1","id":"2"}', "a key stands more than once in the request"),
        ('{"x":1,"parameters":{},"parameters":{}}', "a key stands more than once in the request"),
        ('{"parameters":{"x":1,"x":2}}', "input 'x' already exists in request"),
        ('{"x":1,"parameters":{"p":1,"p":2}}', "a key stands more than once in the request"),
    ],
)
def test_a_key_that_stands_twice(body: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        read_generate(body.encode(), signature(("x", "INT32", [1])))


@pytest.mark.parametrize(("body", "name"), [('{"x":1,"y":1,"y":2,"x":2}', "y"), ('{"x":1,"y":1,"x":2,"y":2}', "x")])
def test_of_several_keys_that_stand_twice_the_first_again_is_named(body: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"input '{name}' already exists"):
        read_generate(body.encode(), signature(("x", "INT32", [1]), ("y", "INT32", [1])))


TEXTS = st.text('\\":{}[],a', max_size=4)


VALUES = st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)


@given(st.dictionaries(TEXTS, VALUES))
def test_keys_that_stand_once(fields: dict[str, Any]) -> None:
    text = json.dumps(fields).encode()
    assert has_all_members(text, len(fields))
    assert not has_all_members(text[:-1] + (b", " if fields else b"") + b'"": 0, "": {":": ":"}}', len(fields) + 1)
