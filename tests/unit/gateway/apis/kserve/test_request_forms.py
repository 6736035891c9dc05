"""Requests that are read by a form that is known are those that protobuf and `decode` would give."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from penstock.classic.messages import InferRequest
from penstock.gateway.apis.kserve.grpc.messages import decode, parse
from penstock.gateway.apis.kserve.grpc.request_forms import KnownRequest, RequestForms
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from support.kserve import identity

MODEL = identity("FP32", name="m")
REGIONS = SharedMemoryRegions(False)


def message(
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (("FP32", (2, 3)), ("UINT8", (5,))),
    id: str = "",
    outputs: tuple[str, ...] = (),
    fill: int = 1,
    **more: Any,
) -> Any:
    made = pb.ModelInferRequest(model_name="m", id=id, **more)
    for number, (datatype, shape) in enumerate(shapes):
        made.inputs.add(name=f"in{number}", datatype=datatype, shape=shape)
        size = int(np.prod(shape)) * {"FP32": 4, "UINT8": 1, "INT64": 8}[datatype]
        made.raw_input_contents.append(bytes([fill]) * size)
    for name in outputs:
        made.outputs.add(name=name)
    return made


def learned(forms: RequestForms, made: Any) -> InferRequest:
    data = made.SerializeToString()
    request = decode(parse(data), MODEL, REGIONS).request
    forms.learn(data, parse(data), request)
    return request


def known(forms: RequestForms, made: Any) -> KnownRequest | None:
    return forms.known(made.SerializeToString())


def same(one: InferRequest, other: InferRequest) -> bool:
    return (one.id, one.outputs, one.parameters) == (other.id, other.outputs, other.parameters) and [
        (name, each.datatype, each.array.shape, each.array.dtype, each.array.tobytes())
        for name, each in one.inputs.items()
    ] == [
        (name, each.datatype, each.array.shape, each.array.dtype, each.array.tobytes())
        for name, each in other.inputs.items()
    ]


SHAPES = st.lists(
    st.tuples(st.sampled_from(["FP32", "UINT8", "INT64"]), st.lists(st.integers(1, 4), max_size=3).map(tuple)),
    min_size=1,
    max_size=3,
).map(tuple)


@settings(max_examples=30)
@given(
    SHAPES,
    st.text(max_size=200),
    st.text(max_size=200),
    st.lists(st.sampled_from("abc"), unique=True).map(tuple),
    st.integers(0, 255),
)
def test_the_same_as_protobuf_reads(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], id: str, other_id: str, outputs: tuple[str, ...], fill: int
) -> None:
    forms = RequestForms()
    learned(forms, message(shapes, id, outputs))
    later = message(shapes, other_id, outputs, fill)
    found = known(forms, later)
    assert found is not None
    assert (found.model_name, found.model_version, found.id, dict(found.parameters)) == ("m", "", other_id, {})
    assert same(found.request(), decode(parse(later.SerializeToString()), MODEL, REGIONS).request)


@settings(max_examples=150)
@given(st.data())
def test_no_other_bytes_are_taken_for_it(choose: st.DataObject) -> None:
    """Whatever is changed, cut or added: it is read as protobuf reads it, or not at all."""
    forms = RequestForms()
    learned(forms, message(id="1", outputs=("a",)))
    data = bytearray(message(id="27", outputs=("a",)).SerializeToString())
    for _ in range(choose.draw(st.integers(1, 3))):
        at = choose.draw(st.integers(0, len(data) - 1))
        match choose.draw(st.sampled_from("scia")):
            case "s":
                data[at] = choose.draw(st.integers(0, 255))
            case "c":
                del data[at : at + choose.draw(st.integers(1, 9))]
            case "i":
                data[at:at] = choose.draw(st.binary(max_size=9))
            case "a":
                data += choose.draw(st.binary(max_size=9))
        data = data or bytearray(b"x")
    found = forms.known(bytes(data))
    if found is not None:
        assert same(found.request(), decode(parse(bytes(data)), MODEL, REGIONS).request)


def test_what_asks_for_more_than_tensors_has_no_form() -> None:
    forms = RequestForms()
    asked = message(id="1")
    asked.parameters["priority"].int64_param = 1
    learned(forms, asked)
    assert known(forms, asked) is None
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="in0", datatype="FP32", shape=[1]).contents.fp32_contents.append(1.0)
    learned(forms, typed)
    assert known(forms, typed) is None


def test_tensors_of_another_size_are_left_to_the_checks() -> None:
    forms = RequestForms()
    learned(forms, message())
    longer = message()
    longer.raw_input_contents[1] += b"x"
    fewer = message()
    del fewer.raw_input_contents[1:]
    assert known(forms, message()) is not None
    assert known(forms, longer) is known(forms, fewer) is None


def test_ids_do_not_count_and_the_latest_forms_are_kept() -> None:
    forms = RequestForms()
    for number in range(100):
        learned(forms, message(id=str(number)))
    first = message((("UINT8", (1,)),))
    learned(forms, first)
    for size in range(2, 64):
        learned(forms, message((("UINT8", (size,)),)))
    assert known(forms, first) is not None, "a hundred ids have been one form"
    learned(forms, message((("UINT8", (64,)),)))
    learned(forms, message((("UINT8", (65,)),)))
    assert known(forms, first) is None
    assert known(forms, message((("UINT8", (65,)),))) is not None
