"""ModelInferRequest to InferRequest and InferResponse to ModelInferResponse, without a network."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from penstock.classic.tensors import NUMPY_TYPES, Tensor
from penstock.engines.errors import InvalidRequestError, NotFoundError, PenstockError
from penstock.gateway.apis.kserve import tensor_plane
from penstock.gateway.apis.kserve.classification import classified
from penstock.gateway.apis.kserve.grpc.messages import Decoded, decode, fill_response
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.tensor_plane import OutputForm
from support.grpc import kserve_of
from support.kserve import FakeModel, identity

MODEL = identity("FP32", name="m")
REGIONS = SharedMemoryRegions(True)


def request(*inputs: tuple[str, str, list[int]], raw: tuple[bytes, ...] = (), **typed: list[Any]) -> Any:
    """Inputs as (name, datatype, shape); `typed` are fields of the first one's contents."""
    message = pb.ModelInferRequest(model_name="m", id="7", raw_input_contents=raw)
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in typed.items():
        getattr(message.inputs[0].contents, field).extend(values)
    return message


def decoded(message: Any, model: FakeModel = MODEL) -> Decoded:
    return decode(pb.ModelInferRequest.FromString(message.SerializeToString()), model, REGIONS)


def refusal(message: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(message)
    return caught.value.message


ARRAYS = {
    "BOOL": np.array([[True], [False]]),
    "UINT8": np.array([[0], [255]], np.uint8),
    "UINT16": np.array([[0], [65535]], np.uint16),
    "UINT32": np.array([[0], [2**32 - 1]], np.uint32),
    "UINT64": np.array([[0], [2**64 - 1]], np.uint64),
    "INT8": np.array([[-128], [127]], np.int8),
    "INT16": np.array([[-(2**15)], [2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31)], [2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63)], [2**63 - 1]], np.int64),
    "FP16": np.array([[0.5], [-1.5]], np.float16),
    "FP32": np.array([[0.5], [-np.inf]], np.float32),
    "FP64": np.array([[0.1], [1e300]], np.float64),
    "BF16": np.array([[0.5], [-1.5]], ml_dtypes.bfloat16),
}
FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


@pytest.mark.parametrize("datatype", ARRAYS)
def test_raw_tensors_there_and_back(datatype: str) -> None:
    array = ARRAYS[datatype]
    tensor = decoded(request(("X", datatype, [2, 1]), raw=(array.tobytes(),))).request.inputs["X"]
    assert (tensor.datatype, tensor.array.dtype, tensor.array.shape) == (datatype, NUMPY_TYPES[datatype], (2, 1))
    assert tensor.array.tobytes() == array.tobytes()
    message = pb.ModelInferResponse()
    fill_response(message, [tensor], {}, None)
    assert message.raw_output_contents[0] == array.tobytes()
    assert (message.outputs[0].datatype, list(message.outputs[0].shape)) == (datatype, [2, 1])
    assert not message.outputs[0].HasField("contents")


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_tensors(datatype: str) -> None:
    array = ARRAYS[datatype]
    tensor = decoded(request(("X", datatype, [2, 1]), **{FIELDS[datatype]: array.ravel().tolist()})).request.inputs["X"]
    assert (tensor.array.dtype, tensor.array.tolist()) == (NUMPY_TYPES[datatype], array.tolist())


ITEMS = [b"", b"a\0", b"\xff\xfe", "ä".encode()]


def test_bytes_tensors_typed_and_raw() -> None:
    packed = b"".join(struct.pack("<I", len(item)) + item for item in ITEMS)
    for message in (request(("X", "BYTES", [4]), raw=(packed,)), request(("X", "BYTES", [4]), bytes_contents=ITEMS)):
        tensor = decoded(message).request.inputs["X"]
        assert tensor.array.tolist() == ITEMS
        answer = pb.ModelInferResponse()
        fill_response(answer, [tensor], {}, None)
        assert answer.raw_output_contents[0] == packed


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_typed_field(datatype: str) -> None:
    assert refusal(request(("X", datatype, [1]), fp32_contents=[1.0])) == (
        "unexpected explicit tensor data for input tensor 'X' for model 'm' of type 'FP32', expected datatype "
        f"'{datatype}'"
    )
    assert "expecting 1" in refusal_of_empty_contents(datatype)


def refusal_of_empty_contents(datatype: str) -> str:
    message = request(("X", datatype, [1]))
    message.inputs[0].contents.SetInParent()
    return refusal(message)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (request(("X", "FP32", [1])), "unable to find data for input tensor 'X' for model 'm' in request."),
        (
            request(("X", "FP32", [1]), ("Y", "FP32", [1]), raw=(b"1234",)),
            "unable to find data for input tensor 'Y' for model 'm' in request.",
        ),
        (
            request(("X", "FP32", [1]), raw=(b"1234",), fp32_contents=[1.0]),
            "contents field must not be specified when using raw_input_contents for 'X' for model 'm'",
        ),
        (request(("X", "FP32", [1]), raw=(b"1234", b"1234")), "raw_input_contents has 2 entries, but 1 inputs"),
        (request(("X", "FP32", [2]), raw=(b"1234",)), "unexpected total byte size 4 for input 'X', expecting 8"),
        (request(("X", "FP32", [2, -1]), raw=(b"1234",)), "negative dimension"),
        (request(("X", "FP32", [2**62, 4]), raw=(b"",)), "more elements than any request can carry"),
        (request(("X", "FP32", [16, 2**60 + 2]), raw=(b"1234",)), "more elements than any request can carry"),
        (request(("X", "FP32", [1] * 65), raw=(b"1234",)), "dimensions"),
        (request(("X", "TYPE_FP32", [1]), raw=(b"1234",)), "unknown datatype 'TYPE_FP32'"),
        (request(("X", "", [1]), raw=(b"1234",)), "unknown datatype ''"),
        (request(("X", "FP32", [1]), ("X", "FP32", [1]), raw=(b"1234",) * 2), "input 'X' already exists in request"),
        (request(("X", "FP32", [2]), fp32_contents=[1.0]), "unexpected number of elements 1 for input 'X'"),
        (request(("X", "FP32", [2]), fp64_contents=[1.0, 2.0]), "of type 'FP64', expected datatype 'FP32'"),
        (request(("X", "WHAT", [1]), fp32_contents=[1.0]), "of type 'FP32', expected datatype '<invalid>'"),
        (request(("X", "INT8", [2]), int_contents=[1, 128]), "values that INT8 cannot hold"),
        (request(("X", "INT8", [2]), int_contents=[1, -129]), "values that INT8 cannot hold"),
        (request(("X", "UINT16", [1]), uint_contents=[65536]), "values that UINT16 cannot hold"),
        (
            request(("X", "BYTES", [1]), raw=(struct.pack("<I", 99) + b"x",)),
            "expecting string of length 99 but only 1 bytes available",
        ),
        (request(("X", "BYTES", [2**39]), raw=(b"12345678",)), "expecting 549755813888 strings in 8 bytes"),
    ],
)
def test_inputs_that_are_refused(message: Any, said: str) -> None:
    assert said in refusal(message)


def test_nothing_is_allocated_for_sizes_that_lie() -> None:
    messages = [request(("X", datatype, [2**38]), raw=(b"1234",)) for datatype in NUMPY_TYPES] + [
        request(("X", "FP32", [2**38]), fp32_contents=[1.0])
    ]
    tracemalloc.start()
    try:
        for message in messages:
            refusal(message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_empty_tensors() -> None:
    assert decoded(request(("X", "FP32", [0, 4]), raw=(b"",))).request.inputs["X"].array.shape == (0, 4)
    scalar = decoded(request(("X", "FP32", []), raw=(b"\0\0\0\0",))).request.inputs["X"]
    assert scalar.array.shape == ()


def test_large_tensors_are_not_copied_when_decoded() -> None:
    message = pb.ModelInferRequest.FromString(
        request(("X", "UINT8", [1 << 22]), raw=(bytes(1 << 22),)).SerializeToString()
    )
    tracemalloc.start()
    try:
        found = decode(message, MODEL, REGIONS)
        assert tracemalloc.get_traced_memory()[1] < (1 << 22) * 1.5  # protobuf makes one bytes object of the field
        assert not found.request.inputs["X"].array.flags.owndata
    finally:
        tracemalloc.stop()


def outputs(**parameters: Any) -> Any:
    message = request(("X", "FP32", [1]), raw=(b"1234",))
    output = message.outputs.add(name="Y")
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(output.parameters[name], kind, value)
    return message


def test_requested_outputs() -> None:
    assert decoded(request(("X", "FP32", [1]), raw=(b"1234",))).request.outputs == ()
    found = decoded(outputs(classification=3, binary_data=True))
    assert found.request.outputs == ("Y",)
    assert found.forms is not None
    assert found.forms["Y"].classes == 3
    assert decoded(outputs(binary_data=True)).forms is None


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"classification": "2"}, "invalid value type for 'classification' parameter, expected int64_param"),
        ({"classification": 0}, "must be at least 1"),
        ({"classification": -(2**63)}, "must be at least 1"),
        ({"shared_memory_region": "r"}, "'shared_memory_byte_size' must be specified along with"),
        ({"shared_memory_region": 1, "shared_memory_byte_size": 1}, "expected string_param"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": "1"}, "expected int64_param"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": -1}, "must not be negative"),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 1, "shared_memory_offset": -1},
            "must not be negative",
        ),
    ],
)
def test_output_parameters_that_are_refused(parameters: dict[str, Any], said: str) -> None:
    assert said in refusal(outputs(**parameters))


def test_an_output_twice_is_refused() -> None:
    message = outputs()
    message.outputs.add(name="Y")
    assert refusal(message) == "output 'Y' already exists in request"


def test_unknown_regions_are_not_found() -> None:
    with pytest.raises(NotFoundError, match="Unable to find shared memory region: 'r'"):
        decoded(outputs(shared_memory_region="r", shared_memory_byte_size=1))


def test_parameters_of_the_protocol_become_fields_and_the_rest_stay() -> None:
    message = request(("X", "FP32", [1]), raw=(b"1234",))
    message.parameters["sequence_id"].uint64_param = 2**64 - 1
    message.parameters["sequence_start"].bool_param = True
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.parameters["x"].double_param = 0.5
    found = decoded(message)
    assert found.empty_final
    assert (found.request.correlation_id, found.request.sequence_start) == (2**64 - 1, True)
    assert found.request.parameters == {"x": 0.5}
    message.parameters["y"].SetInParent()
    assert refusal(message).startswith("invalid value type for 'y' parameter")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_ours(data: bytes) -> None:
    try:
        message = pb.ModelInferRequest.FromString(data)
    except Exception:  # no message at all
        return
    try:
        decode(message, MODEL, REGIONS)
    except PenstockError:
        return


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["X", "Y", ""]),
            st.sampled_from([*NUMPY_TYPES, "nope"]),
            st.lists(st.integers(-2, 5) | st.integers(-(2**63), 2**63 - 1), max_size=4),
        ),
        max_size=3,
    ),
    st.lists(st.binary(max_size=40), max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
)
def test_whatever_the_sizes_say(inputs: list[Any], raw: list[bytes], typed: list[int]) -> None:
    message = request(*inputs, raw=tuple(raw), **({"int_contents": typed} if inputs and typed else {}))
    try:
        found = decoded(message).request.inputs
    except PenstockError:
        return
    for name, datatype, shape in inputs:
        assert (found[name].datatype, list(found[name].array.shape)) == (datatype, shape)


def test_response_parameters_and_regions_keep_their_order() -> None:
    tensors = [Tensor(name, "INT32", np.arange(2, dtype=np.int32)) for name in ("A", "B")]
    message = pb.ModelInferResponse()
    fill_response(message, tensors, {"n": -1}, None)
    assert [output.name for output in message.outputs] == ["A", "B"]
    assert message.parameters["n"].int64_param == -1


def test_a_region_of_another_size_is_not_even_read() -> None:
    class Huge:
        byte_size = 1 << 40

        def read(self) -> memoryview:
            raise AssertionError("read")

    class Regions:
        def slice(self, name: str, offset: int, byte_size: int) -> Huge:
            return Huge()

    message = request(("X", "FP32", [1]))
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 1 << 40
    with pytest.raises(
        InvalidRequestError, match="unexpected total byte size 1099511627776 for input 'X', expecting 4"
    ):
        decode(message, MODEL, Regions())  # type: ignore[arg-type]


def test_classes_do_not_go_to_shared_memory() -> None:
    class Regions:
        def slice(self, name: str, offset: int, byte_size: int) -> object:
            return object()

    message = outputs(classification=1, shared_memory_region="r", shared_memory_byte_size=8)
    with pytest.raises(InvalidRequestError, match="can't set both 'shared_memory_region' and 'classification'"):
        decode(message, MODEL, Regions())  # type: ignore[arg-type]


async def test_classes_are_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them would hold up all other requests for a second."""
    threads: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Tensor:
        threads.append(threading.get_ident())
        return classified(*arguments, **options)

    monkeypatch.setattr(tensor_plane, "classified", noted)
    tensor = Tensor("OUTPUT0", "FP32", np.arange(4, dtype=np.float32))
    [found] = await kserve_of(MODEL).plane.in_forms(MODEL, [tensor], {"OUTPUT0": OutputForm(classes=1)})
    assert found.array.tolist() == [b"3.000000:3"]
    assert threads
    assert threads != [threading.get_ident()]
