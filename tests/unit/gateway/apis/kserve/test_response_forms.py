"""Responses that are put together from prepared bytes are those that protobuf would write."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.tensors import Tensor, to_buffer
from penstock.gateway.apis.kserve.grpc.messages import ResponseEncoder, ResponseForms, fill_response
from penstock.gateway.apis.kserve.parameters import FINAL


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


FORMS = ResponseForms()


@settings(max_examples=60)
@given(st.lists(st.tuples(OUTPUTS, st.booleans()), max_size=12), st.text(max_size=5), st.integers(1, 3))
def test_the_same_as_protobuf_writes(responses: list[tuple[list[Tensor], bool]], request_id: str, version: int) -> None:
    encoder = ResponseEncoder(FORMS, "m", version, request_id)
    for outputs, final in responses:
        expected = ModelInferResponse(model_name="m", model_version=str(version), id=request_id)
        fill_response(expected, outputs, {}, None)
        assert ModelInferResponse.FromString(encoder.encode(outputs)) == expected
        expected.parameters[FINAL].bool_param = final
        streamed = ModelStreamInferResponse(infer_response=expected)
        assert ModelStreamInferResponse.FromString(encoder.encode_for_stream(outputs, final=final)) == streamed


def test_large_tensors_of_every_kind_and_layout() -> None:
    wide = np.arange(60_000)
    for tensor in (
        Tensor("a", "FP32", wide.astype(np.float32).reshape(3, 200, 100)),
        Tensor("a", "FP32", wide.astype(np.float32).reshape(300, 200).T),
        Tensor("a", "BF16", wide.astype(ml_dtypes.bfloat16)),
        Tensor("a", "BOOL", wide % 2 == 0),
    ):
        encoded = ResponseEncoder(FORMS, "m", 1, "").encode([tensor])
        assert ModelInferResponse.FromString(encoded).raw_output_contents == [to_buffer(tensor)]


def test_as_many_forms_are_kept_as_models_have_outputs() -> None:
    forms = ResponseForms()
    for size in range(1, 1000):
        ResponseEncoder(forms, "m", 1, "").encode([Tensor("a", "FP32", np.zeros(size, np.float32))])
    assert len(forms) == 256
