"""Bodies of inference requests and responses: JSON with binary tensors behind it."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, NotFoundError, PenstockError, UnsupportedError
from penstock.gateway.apis.kserve.http_infer import encode_infer, parse_infer
from penstock.gateway.apis.kserve.infer_heads import HttpForm, Inference
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from support.kserve import FakeModel, FakeModelStore, add_sub, identity
from support.kserve_http import kserve_context

FLOATS = [float(value) for value in range(16)]
BINARY = np.arange(16, dtype="<f4").tobytes()


def json_input(name: str = "INPUT0", **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [16], "datatype": "FP32", "data": FLOATS} | fields


def binary_input(name: str = "INPUT0", size: int = 64, **fields: Any) -> dict[str, Any]:
    found = json_input(name, parameters={"binary_data_size": size}) | fields
    del found["data"]
    return found


def parsed(
    head: dict[str, Any] | bytes,
    tail: bytes = b"",
    *,
    model: FakeModel | None = None,
    length: int | None = None,
    regions: SharedMemoryRegions | None = None,
) -> Inference:
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    if length is None and tail:
        length = len(data)
    return parse_infer(data + tail, length, model or add_sub(), regions or SharedMemoryRegions(False))


def answered(
    inference: Inference, *tensors: Tensor, model: FakeModel | None = None, **response: Any
) -> tuple[Any, bytes]:
    parts = encode_infer(inference, model or add_sub(), tensors, response.get("parameters", {}))
    return json.loads(parts[0]), b"".join(parts[1:])


FP32 = Tensor("OUTPUT0", "FP32", np.arange(3, dtype="<f4"))


def test_json_inputs() -> None:
    inference = parsed({"id": "7", "inputs": [json_input(), json_input("INPUT1", data=[FLOATS])]})
    assert inference.request.id == "7"
    assert inference.request.outputs == ()
    assert list(inference.request.inputs) == ["INPUT0", "INPUT1"]
    assert inference.request.inputs["INPUT1"].array.tolist() == FLOATS
    assert not inference.binary


def test_binary_inputs_follow_each_other() -> None:
    tail = BINARY + struct.pack("<I", 3) + b"abc" + b"\1\0"
    inputs = [
        binary_input(),
        json_input("J", shape=[2], datatype="INT8", data=[1, 2]),
        binary_input("S", 7, shape=[1, 1], datatype="BYTES"),
        binary_input("B", 2, shape=[2], datatype="BOOL"),
    ]
    found = parsed({"inputs": inputs}, tail).request.inputs
    assert found["INPUT0"].array.tolist() == FLOATS
    assert found["J"].array.tolist() == [1, 2]
    assert found["S"].array.tolist() == [[b"abc"]]
    assert found["B"].array.tolist() == [True, False]


@pytest.mark.parametrize("padding", range(9))
def test_binary_inputs_are_aligned_wherever_they_stand(padding: int) -> None:
    found = parsed({"inputs": [binary_input()], "x": " " * padding}, BINARY).request.inputs["INPUT0"].array
    assert found.flags.aligned
    assert found.tolist() == FLOATS


@pytest.mark.parametrize(
    "fields",
    [
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "OUTPUT1"}, {"name": "OUTPUT0"}], "parameters": {"binary_data_output": False}},
        {"id": "7", "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True, "classification": 2}}]},
        {"parameters": {"sequence_id": 3, "sequence_start": True, "mine": "x"}},
    ],
)
def test_a_head_that_came_before_says_the_same_of_other_elements(fields: dict[str, Any]) -> None:
    """Nothing that a model or a front notes at one request is seen by the next."""
    head = {"inputs": [binary_input(), binary_input("I", 8, shape=[2, 1], datatype="INT32")], **fields}
    first = parsed(head, BINARY + struct.pack("<2i", 1, 2))
    forms, outputs = dict(first.forms), first.request.outputs
    parameters, sequence = dict(first.request.parameters), first.request.correlation_id
    first.request.parameters["noted"] = True
    first.request.inputs.clear()
    found = parsed(head, BINARY[::-1] + struct.pack("<2i", 3, 4))
    assert found.request.inputs["INPUT0"].array.tobytes() == BINARY[::-1]
    assert found.request.inputs["I"].array.tolist() == [[3], [4]]
    assert (found.forms, found.request.outputs, found.binary) == (forms, outputs, first.binary)
    assert (found.request.parameters, found.request.correlation_id) == (parameters, sequence)
    assert found.request.id == first.request.id
    for tail, words in ((BINARY, "expecting 8 additional bytes"), (BINARY * 2, "unexpected additional input data")):
        with pytest.raises(InvalidRequestError, match=words):
            parsed(head, tail)


def test_the_head_of_a_binary_answer_is_the_same_with_and_without_what_it_may_have() -> None:
    inference = Inference(parsed({"inputs": []}).request, binary=True)
    plain = answered(inference, FP32, FP32)
    assert plain == answered(inference, FP32, FP32)
    head, data = answered(inference, FP32, FP32, parameters={"a": 1})
    assert head.pop("parameters") == {"a": 1}
    assert (head, data) == plain
    wide = answered(inference, Tensor("OUTPUT0", "FP32", np.zeros((3, 1), "<f4")))[0]["outputs"]
    assert wide == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [3, 1], "parameters": {"binary_data_size": 12}}]


def test_half_floats_come_in_binary_and_json() -> None:
    for datatype in ("FP16", "BF16"):
        tail = np.zeros(16, "<u2").tobytes()
        assert parsed({"inputs": [binary_input(size=32, datatype=datatype)]}, tail)
        assert parsed({"inputs": [json_input(datatype=datatype)]})


def test_parameters_are_taken() -> None:
    request = parsed({"inputs": [], "parameters": {"priority": 2, "mine": "x", "binary_data_output": True}}).request
    assert (request.priority, request.parameters) == (2, {"mine": "x"})


def test_a_raw_body_is_the_only_input() -> None:
    inference = parsed(BINARY, length=0, model=identity("FP32", [2, -1], max_batch_size=4))
    assert inference.request.inputs["INPUT0"].array.shape == (1, 2, 8)
    assert inference.binary
    text = parsed(b"any text", length=0, model=identity("BYTES", [1])).request.inputs["INPUT0"].array
    assert text.tolist() == [b"any text"]
    nothing = parsed(b"", length=0, model=identity("FP32", [-1])).request.inputs["INPUT0"].array
    assert nothing.shape == (0,)


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        (add_sub(), BINARY, "Raw request must only have 1 input"),
        (identity("FP32", [-1, -1]), BINARY, "at most one variable dimension"),
        (identity("FP32", [16]), BINARY[:-1], "unexpected total byte size 63"),
        (identity("FP32", [-1]), BINARY[:-1], "unexpected total byte size 63"),
        (identity("FP32", [3, -1]), BINARY, "unexpected total byte size 64"),
        (identity("FP32", [-1, 0]), BINARY, "unexpected total byte size 64"),
        (identity("BYTES", [2]), b"abc", "string"),
    ],
)
def test_bad_raw_bodies(model: FakeModel, body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        parsed(body, length=0, model=model)


@pytest.mark.parametrize(
    ("inputs", "tail", "words"),
    [
        ([binary_input()], BINARY + b"x", "unexpected additional input data for model 'add_sub'"),
        ([binary_input()], BINARY[:-3], "expecting 3 additional bytes for model 'add_sub'"),
        ([binary_input(), binary_input("INPUT1")], BINARY, "size for input 'INPUT1', expecting 64 additional bytes"),
        ([binary_input(size=60)], BINARY[:60], "unexpected total byte size 60 for input 'INPUT0', expecting 64"),
        ([binary_input(size=-64)], BINARY, "must not be negative"),
        ([binary_input(size=2**70)], BINARY, "additional bytes"),
        ([binary_input(size=64.0)], BINARY, "binary_data_size"),  # type: ignore[arg-type]
        ([binary_input(size=True)], BINARY, "binary_data_size"),
        ([binary_input(datatype="FP31")], BINARY, "datatype"),
        ([binary_input(shape=[16, 2**60 + 2])], BINARY, "more elements"),
        ([binary_input(shape=[2, -5])], BINARY, "negative dimension"),
        ([binary_input(shape=[0, 2**39, 2**39], size=0)], b"", "more elements than any request"),
        ([binary_input(shape=[1] * 33)], BINARY, "more than 32 dimensions"),
        ([json_input(shape=[1] * 33)], b"", "more than 32 dimensions"),
        ([json_input(), json_input()], b"", "input 'INPUT0' already exists in request"),
        ([json_input(), binary_input()], BINARY, "input 'INPUT0' already exists in request"),
        ([json_input(parameters={"binary_data_size": 64})], BINARY, "only one of the following fields"),
        ([binary_input(parameters={})], b"", "only one of the following fields"),
        ([binary_input(parameters={"shared_memory_region": "r", "binary_data_size": 1})], b"", "only one"),
        ([binary_input(parameters={"shared_memory_byte_size": 64})], b"", "only one"),
        ([binary_input(parameters={"shared_memory_region": "r"})], b"", "must be given together"),
        ([binary_input(datatype="BYTES", shape=[1])], struct.pack("<I", 61) + b"x" * 60, "string"),
        ([binary_input(datatype="BYTES", shape=[1])], struct.pack("<I", 2**32 - 1) + b"x" * 60, "string"),
        ([binary_input(datatype="BYTES", shape=[1])], struct.pack("<I", 59) + b"x" * 60, "string"),
        ([binary_input(datatype="BYTES", shape=[17])], b"\0" * 64, "string"),
        ([binary_input(datatype="BYTES", shape=[15])], b"\0" * 64, "string"),
        ([binary_input(datatype="BYTES", shape=[2**39])], b"\0" * 64, "string"),
        ([json_input(name=5)], b"", "name"),
        ([json_input(shape=16)], b"", "shape"),
        ([json_input(shape=["16"])], b"", "shape"),
        ([json_input(datatype=None)], b"", "datatype"),
        ([5], b"", "inputs"),
    ],
)
def test_bad_inputs_are_refused_and_nothing_allocated(inputs: list[Any], tail: bytes, words: str) -> None:
    data = json.dumps({"inputs": inputs}).encode()
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=words):
        parse_infer(data + tail, len(data), add_sub(), SharedMemoryRegions(True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 17


@pytest.mark.parametrize("length", [2, 10**6, 99999999999])
def test_header_lengths_that_lie(length: int) -> None:
    with pytest.raises(InvalidRequestError):
        parsed({"inputs": [binary_input()]}, BINARY, length=length)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"inputs":[]} x',
        b'{"inputs":{}}',
        b"{}",
        b'{"inputs":[],"id":5}',
        b'{"inputs":[],"id":"\xff"}',
        b'{"inputs":[],"parameters":[1]}',
        b'{"inputs":[],"parameters":{"a":null}}',
        b'{"inputs":[],"parameters":{"binary_data_output":1}}',
        b'{"inputs":[],"outputs":{}}',
        b'{"inputs":[],"outputs":[{"name":"A"},{"name":"A"}]}',
        b'{"inputs":[],"outputs":[{"name":"A","parameters":{"classification":-1}}]}',
        b'{"inputs":[],"outputs":[{"name":"A","parameters":{"classification":true}}]}',
        b'{"inputs":[],"outputs":[{"name":"A","parameters":{"classification":1e3}}]}',
        b'{"inputs":[],"outputs":[{"name":"A","parameters":{"classification":99999999999}}]}',
        b'{"inputs":[],"outputs":[{"name":"A","parameters":{"binary_data":1}}]}',
        b'{"inputs":[],"outputs":[{"name":"A","parameters":{"shared_memory_byte_size":1}}]}',
        b'{"inputs":[],"x":' + b"[" * 250_000 + b"]" * 250_000 + b"}",
        b'{"inputs":[],"x":' + b"[" * 250_000,
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":' + b"[" * 120 + b"1" + b"]" * 120 + b"}]}",
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":[NaN]}]}',
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":[' + b"1" * 5000 + b"]}]}",
        b"\xef\xbb\xbf" + b'{"inputs":[]}',
        '{"inputs":[]}'.encode("utf-16"),
    ],
)
def test_bad_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parsed(body)


def test_null_is_what_a_client_has_left_out() -> None:
    tensor = {"name": "A", "shape": [1], "datatype": "FP32", "data": [1], "parameters": None}
    found = parsed({"inputs": [tensor], "id": None, "parameters": None, "outputs": None})
    assert (found.request.id, found.request.parameters, found.request.outputs) == ("", {}, ())
    found = parsed({"inputs": [tensor], "outputs": [{"name": "B", "parameters": None}]})
    assert found.forms == {"B": HttpForm(binary=False)}


def test_nesting_up_to_the_limit_is_fine() -> None:
    data = b"[" * 50 + b"1" + b"]" * 50
    assert parsed(b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":' + data + b"}]}")


def test_requested_outputs_and_their_forms() -> None:
    outputs = [
        {"name": "B", "parameters": {"binary_data": False}},
        {"name": "A"},
        {"name": "C", "parameters": {"classification": 3, "binary_data": True}},
    ]
    inference = parsed({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert inference.request.outputs == ("B", "A", "C")
    assert [inference.forms[name].binary for name in "BAC"] == [False, True, True]
    assert inference.forms["C"].classes == 3


def test_a_json_answer() -> None:
    inference = parsed({"id": "9", "inputs": []})
    head, tail = answered(inference, FP32, Tensor("S", "BYTES", np.array([[b"a"]], object)), parameters={"p": 1})
    assert head == {
        "id": "9",
        "model_name": "add_sub",
        "model_version": "1",
        "parameters": {"p": 1},
        "outputs": [
            {"name": "OUTPUT0", "datatype": "FP32", "shape": [3], "data": [0.0, 1.0, 2.0]},
            {"name": "S", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
        ],
    }
    assert tail == b""


def test_an_answer_says_no_more_than_needed() -> None:
    head, _ = answered(parsed({"inputs": []}), FP32)
    assert list(head) == ["model_name", "model_version", "outputs"]


def test_a_binary_answer() -> None:
    inference = parsed({"inputs": [], "parameters": {"binary_data_output": True}})
    head, tail = answered(inference, FP32, Tensor("S", "BYTES", np.array([b"a"], object)))
    assert head["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 12}},
        {"name": "S", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
    ]
    assert tail == FP32.array.tobytes() + b"\1\0\0\0a"


async def test_classes_of_a_batch() -> None:
    inference = parsed({"inputs": [], "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}]})
    model = identity("FP32", [2], max_batch_size=4)
    tensor = Tensor("OUTPUT0", "FP32", np.array([[1, 2], [4, 3]], np.float32))
    outputs = await kserve_context(FakeModelStore(model)).plane.in_forms(model, [tensor], inference.forms)
    head, _ = answered(inference, *outputs, model=model)
    assert head["outputs"][0] == {
        "name": "OUTPUT0",
        "datatype": "BYTES",
        "shape": [2, 1],
        "data": ["2.000000:1", "4.000000:0"],
    }


def test_shared_memory_must_be_allowed() -> None:
    memory = {"shared_memory_region": "r", "shared_memory_byte_size": 64}
    with pytest.raises(UnsupportedError):
        parsed({"inputs": [binary_input(parameters=memory)]})
    with pytest.raises(UnsupportedError):
        parsed({"inputs": [], "outputs": [{"name": "OUTPUT0", "parameters": memory}]})


@pytest.mark.parametrize("other", ["binary_data", "classification"])
def test_an_output_has_one_place_only(other: str) -> None:
    parameters = {
        "shared_memory_region": "r",
        "shared_memory_byte_size": 64,
        other: {"binary_data": True}.get(other, 1),
    }
    with pytest.raises(InvalidRequestError, match=f"Output can't set both 'shared_memory_region' and '{other}'"):
        parsed({"inputs": [], "outputs": [{"name": "A", "parameters": parameters}]})


def test_unknown_regions() -> None:
    memory = {"shared_memory_region": "zz", "shared_memory_byte_size": 64}
    for body in (
        {"inputs": [binary_input(parameters=memory)]},
        {"inputs": [], "outputs": [{"name": "A", "parameters": memory}]},
    ):
        with pytest.raises(NotFoundError, match="Unable to find shared memory region: 'zz'"):
            parsed(body, regions=SharedMemoryRegions(True))


def test_no_mutation_of_a_good_request_is_an_internal_error() -> None:
    """Every byte of the JSON part, one after the other, becomes each of a few others: accepted or refused."""
    head = json.dumps({"inputs": [binary_input(shape=[4, 4])], "parameters": {"a": 1}}, separators=(",", ":")).encode()
    model, regions = add_sub(), SharedMemoryRegions(False)
    refused = 0
    for position in range(len(head)):
        for other in b'"0-[{}],x\\':
            mutated = head[:position] + bytes([other]) + head[position + 1 :]
            try:
                parse_infer(mutated + BINARY, len(head), model, regions)
            except PenstockError:
                refused += 1
    assert refused > len(head)


MANY = 200_000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"inputs":[' + b'{"name":"","shape":[],"datatype":""},' * MANY + b"{}]}", "more than 16384 members"),
        (b'{"inputs":[],"outputs":[' + b'{"name":""},' * MANY + b"{}]}", "more than 16384 members"),
        (b'{"inputs":[],"parameters":{' + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}}", "16384 members"),
        (b'{"inputs":[],"parameters":{"a":[' + b"[]," * MANY + b"1]}}", "parameter 'a' must be a boolean"),
    ],
)
def test_many_tiny_parts_are_refused_before_they_are_decoded(body: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=words):
            parsed(body)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(body)
    finally:
        tracemalloc.stop()


def test_what_stands_in_strings_is_no_member() -> None:
    texts = ['{"a":[1]}'] * 20_000
    given = {"name": "INPUT0", "shape": [20_000], "datatype": "BYTES", "data": texts}
    inference = parsed({"inputs": [given]}, model=identity("BYTES", [-1]))
    assert inference.request.inputs["INPUT0"].array.tolist() == [text.encode() for text in texts]
