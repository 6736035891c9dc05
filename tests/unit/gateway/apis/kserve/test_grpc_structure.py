"""Messages of many small parts are refused before they are parsed."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.grpc.messages import parse
from penstock.gateway.apis.kserve.grpc.request_forms import MAX_FIELDS

HEAD = pb.ModelInferRequest(model_name="m").SerializeToString()


def field(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (field(4, b"") * 500_000, f"the request has more than {MAX_FIELDS} fields"),
        (field(5, b"") * 500_000, f"the request has more than {MAX_FIELDS} fields"),
        (field(6, b"") * 500_000, f"the request has more than {MAX_FIELDS} fields"),
        (field(7, b"") * 500_000, f"the request has more than {MAX_FIELDS} fields"),
        (field(5, field(4, b"") * 500_000), f"the request has more than {MAX_FIELDS} fields"),
        (field(6, field(2, b"") * 500_000), f"the request has more than {MAX_FIELDS} fields"),
        (field(5, field(3, b"\1" * 1_000_000)), "an input has more than 32 dimensions"),
        (b"\x0b\x0c" + field(5, b"") * 500_000, "the request message cannot be decoded"),
        (b"\xff" * 100_000, "the request message cannot be decoded"),
        (field(7, b"x" * 100_000)[:-1], "the request message cannot be decoded"),
        (field(5, b"\x0a\x7f" + b"x" * 70_000)[:70_000], "the request message cannot be decoded"),
        (field(7, b"x" * 70_000) + b"\x0d\0", "the request message cannot be decoded"),
    ],
)
def test_too_many_fields_and_broken_messages_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(HEAD + data)
    assert caught.value.message == said


def test_long_messages_of_few_fields_are_parsed() -> None:
    message = pb.ModelInferRequest(model_name="m", id="1")
    for index in range(1000):
        tensor = message.inputs.add(name=f"INPUT{index}", datatype="FP32", shape=[1, 64])
        tensor.parameters["a"].string_param = "b" * 200
        message.outputs.add(name=f"OUTPUT{index}").parameters["classification"].int64_param = 3
        message.raw_input_contents.append(np.ones(64, np.float32).tobytes())
    tensor = message.inputs.add(name="TYPED", datatype="BYTES", shape=[MAX_FIELDS * 2])
    tensor.contents.bytes_contents.extend([b"x"] * (MAX_FIELDS * 2))
    message.parameters["long"].string_param = "x" * 1_000_000
    assert parse(message.SerializeToString()) == message
