"""Responses that are put together from prepared bytes are those that protobuf would write."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor
from penstock.gateway.kserve.grpc.encode import fill_response
from penstock.gateway.kserve.grpc.parameters import FINAL
from penstock.gateway.kserve.grpc.stream_encoder import StreamEncoder


def text(name: str, *values: bytes) -> Tensor:
    return Tensor(name, "BYTES", np.array(values, np.object_))


OUTPUTS = st.lists(
    st.one_of(
        st.builds(text, st.sampled_from(["text_output", "b"]), st.binary(max_size=300)),
        st.builds(text, st.just("two"), st.binary(max_size=3), st.just(b"x" * 20_000)),
        st.integers(0, 40).map(lambda size: Tensor("numbers", "FP32", np.zeros((1, size), np.float32))),
    ),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(OUTPUTS, st.booleans()), max_size=12), st.text(max_size=5))
def test_the_same_as_protobuf_writes(responses: list[tuple[list[Tensor], bool]], request_id: str) -> None:
    encoder = StreamEncoder("m", 3, request_id)
    for outputs, final in responses:
        expected = ModelStreamInferResponse()
        part = expected.infer_response
        part.model_name, part.model_version, part.id = "m", "3", request_id
        part.parameters[FINAL].bool_param = final
        fill_response(part, InferResponse(outputs, final=final), outputs, None)
        assert ModelStreamInferResponse.FromString(encoder.encode(outputs, final=final)) == expected
