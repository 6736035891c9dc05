"""Elements of tensors in JSON: all datatypes both ways, and strictly."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.tensors import NUMPY_TYPES, Tensor
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.infer_json import LONG, from_json, to_json


def read(datatype: str, data: Any, shape: tuple[int, ...] | None = None) -> Any:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    shape = (len(data),) if shape is None else shape
    tensor = from_json("IN", datatype, shape, msgspec.Raw(text))
    assert tensor.array.dtype == NUMPY_TYPES[datatype]
    assert tensor.array.shape == shape
    return tensor.array


def written(datatype: str, array: Any) -> Any:
    return json.loads(msgspec.json.encode(to_json(Tensor("OUT", datatype, array))))


INTEGERS = {name: np.iinfo(dtype) for name, dtype in NUMPY_TYPES.items() if dtype.kind in "iu"}


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_keep_their_whole_range(datatype: str) -> None:
    bounds = INTEGERS[datatype]
    values = [int(bounds.min), 0, int(bounds.max)]
    array = read(datatype, values)
    assert array.tolist() == values
    assert written(datatype, array) == values


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_out_of_range_are_refused(datatype: str) -> None:
    bounds = INTEGERS[datatype]
    for value in (int(bounds.min) - 1, int(bounds.max) + 1, 10**40):
        with pytest.raises(InvalidRequestError, match=r"out of (the )?range"):
            read(datatype, [value])


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_floats_go_both_ways(datatype: str) -> None:
    values = [0.5, -2, 0, 1e4]
    array = read(datatype, values)
    assert array.astype(np.float64).tolist() == np.array(values, NUMPY_TYPES[datatype]).astype(np.float64).tolist()
    assert written(datatype, array) == array.astype(np.float64).tolist()


@pytest.mark.parametrize(("datatype", "value"), [("FP16", 70000.0), ("BF16", 1e39), ("FP32", 1e39), ("FP32", -4e38)])
def test_floats_that_would_become_infinite_are_refused(datatype: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match="out of the range"):
        read(datatype, [value])


def test_booleans_are_true_and_false_only() -> None:
    array = read("BOOL", [True, False])
    assert array.tolist() == [True, False]
    assert written("BOOL", array) == [True, False]


def test_strings_are_utf8_with_any_character() -> None:
    values = ["", "abc\0def", 'ä\n"\\', "[1,2]", "😀", ","]
    array = read("BYTES", values)
    assert array.tolist() == [value.encode() for value in values]
    assert written("BYTES", array) == values


@given(st.lists(st.text(), max_size=20))
def test_any_strings_go_both_ways(values: list[str]) -> None:
    assert written("BYTES", read("BYTES", values)) == values


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_any_floats_go_both_ways(values: list[float]) -> None:
    assert written("FP32", read("FP32", values)) == values


@pytest.mark.parametrize("datatype", ["FP32", "INT32", "BYTES", "BOOL"])
def test_nested_data_is_flattened_whatever_its_form(datatype: str) -> None:
    a, b, c, d = {"BYTES": ["a", "b]", "[c", "d"], "BOOL": [True, False, True, True]}.get(datatype, [1, 2, 3, 4])
    flat = read(datatype, [a, b, c, d], (2, 2)).tolist()
    assert read(datatype, [[a, b], [c, d]], (2, 2)).tolist() == flat
    assert read(datatype, [[[a], [b, c]], d], (2, 2)).tolist() == flat


def test_empty_tensors() -> None:
    assert read("FP32", [], (0,)).size == 0
    assert read("FP32", [[], []], (2, 0)).size == 0
    assert read("BYTES", [[], []], (2, 0)).size == 0
    assert written("FP32", np.empty((2, 0), np.float32)) == []


def test_scalars_have_one_element() -> None:
    assert read("INT8", [5], ()).tolist() == 5


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("FP32", b'["1","2"]'),
        ("FP32", b"[true,1]"),
        ("FP32", b"[null,1]"),
        ("FP32", b'[{"a":1},2]'),
        ("FP32", b'[{"a":1,"b":2}]'),
        ("FP32", b"{}"),
        ("FP32", b"5"),
        ("FP32", b"null"),
        ("FP32", b"[]"),
        ("FP32", b"[[],[]]"),
        ("FP32", b"[[1,2],[]]"),
        ("FP32", b"[1]"),
        ("FP32", b"[1,2,3]"),
        ("FP32", b'["a,b"]'),
        ("FP64", b"[1e999,1]"),
        ("INT32", b"[1.0,2]"),
        ("INT32", b"[1e2,2]"),
        ("INT32", b"[true,2]"),
        ("BOOL", b"[1,0]"),
        ("BOOL", b'["true","false"]'),
        ("BYTES", b"[1,2]"),
        ("BYTES", b'["a"]'),
        ("BYTES", b'["a","b","c"]'),
        ("BYTES", b'["a",["b",1]]'),
        ("BYTES", b'[{"a":"b"}]'),
        ("BYTES", b'["a\\",\\"b"]'),
        ("BYTES", b'["\\ud800","a"]'),
        ("TYPE_FP32", b"[1,2]"),
        ("fp32", b"[1,2]"),
        ("", b"[1,2]"),
    ],
)
def test_anything_but_two_elements_of_the_datatype_is_refused(datatype: str, data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read(datatype, data, (2,))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[1,2]", "it has elements that are not strings"),
        (b'["a",1]', "it has elements that are not strings"),
        (b'["a",null,"b","c"]', "it has elements that are not strings"),
        (b'["1, 2]", ["b", true]]', "it has elements that are not strings"),
        (b'["a"]', "Shape does not match true shape of 'data' field"),
        (b'["a, 1", ["[2]"], "\\"3"]', "Shape does not match true shape of 'data' field"),
        (b"[]", "Shape does not match true shape of 'data' field"),
    ],
)
def test_numbers_for_strings_are_told_from_too_few(data: bytes, why: str) -> None:
    """Report kserve#2512: "Unable to parse 'data'", and neither the input nor what is wrong with it."""
    with pytest.raises(InvalidRequestError) as caught:
        read("BYTES", data, (2,))
    assert caught.value.message == f"Unable to parse 'data': {why} (input 'IN')"


def test_escaped_quotes_are_not_counted() -> None:
    assert read("BYTES", ['"', '\\"', "\\"], (3,)).tolist() == [b'"', b'\\"', b"\\"]


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES", "BF16"])
def test_long_tensors_are_coded_in_pieces(datatype: str) -> None:
    count = 2 * LONG + 3
    values: list[Any] = [index % 2 for index in range(count)]
    if datatype in ("BOOL", "BYTES"):
        values = [bool(value) if datatype == "BOOL" else "x" * value for value in values]
    array = read(datatype, values)
    assert array.size == count
    assert written(datatype, array) == values
    assert read(datatype, [values[:LONG], values[LONG:]], (count,)).tolist() == array.tolist()


def test_a_bad_element_far_inside_is_found() -> None:
    values: list[Any] = [1] * (3 * LONG)
    values[2 * LONG] = 1.5
    with pytest.raises(InvalidRequestError):
        read("INT32", values)


def test_long_data_takes_little_more_than_its_tensor() -> None:
    text = b"[" + b"1," * (2**20 - 1) + b"1]"
    tracemalloc.start()
    array = read("FP32", text, (2**20,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert array.sum() == 2**20
    assert peak < 4 * array.nbytes


@pytest.mark.parametrize(
    "shape",
    [
        (16, 2**60 + 2),
        (2, -5),
        (-2, -5),
        (2**64,),
        (0, 2**39, 2**39),
        (2**40,),
        (2**31, 2**31, 2**31),
    ],
)
@pytest.mark.parametrize("datatype", ["FP64", "BYTES"])
def test_lying_shapes_cost_nothing(shape: tuple[int, ...], datatype: str) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidRequestError):
        read(datatype, b"[]" if 0 in shape else b"[1,2]", shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_nan_and_infinities_are_null_and_the_json_valid() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    assert written("FP32", array) == [None, None, None, 1.0]
    assert written("BF16", array.astype(ml_dtypes.bfloat16)) == [None, None, None, 1.0]


def test_bytes_that_are_no_text_are_refused_not_mangled() -> None:
    array = np.array([b"ok", b"\xff"], np.object_)
    with pytest.raises(InvalidRequestError, match="ask for it as binary data"):
        to_json(Tensor("OUT", "BYTES", array))
