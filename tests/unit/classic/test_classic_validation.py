"""Requests against configurations: Triton's checks, in Triton's words (taken from a 2.51 server)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.classic.messages import InferRequest
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError
from support.classic import ADD_SUB, model_config, request

NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
OPTIONAL = """
    name: "opt" max_batch_size: 4
    input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
    input { name: "B" data_type: TYPE_FP32 dims: [ 2 ] }
    input { name: "C" data_type: TYPE_FP32 dims: [ 2 ] optional: true }
"""
WILD = """
    name: "wild" max_batch_size: 4
    input { name: "A" data_type: TYPE_FP32 dims: [ -1, 2 ] }
    input { name: "S" data_type: TYPE_STRING dims: [ 1 ] }
"""
PLAIN = 'name: "plain" input { name: "A" data_type: TYPE_FP32 dims: [ 3 ] } output { name: "O" data_type: TYPE_FP32 }'


def fp32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def refusal(config: str, wrong: InferRequest) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(wrong, ModelSignature(model_config(config)))
    assert type(caught.value) is InvalidRequestError
    return caught.value.message


def expected_shape(name: str, model: str, wanted: str, got: str) -> str:
    where = f"unexpected shape for input '{name}' for model '{model}'"
    return f"[request id: <id_unknown>] {where}. Expected {wanted}, got {got}. "


MISSING = "Please provide all required input(s)."


@pytest.mark.parametrize(
    ("config", "wrong", "text"),
    [
        (
            ADD_SUB,
            request(id="7", INPUT0=fp32(1, 4)),
            "[request id: 7] expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) ['INPUT0'], but "
            f"missing required input(s) ['INPUT1']. {MISSING}",
        ),
        (
            ADD_SUB,
            request(),
            "[request id: <id_unknown>] expected 2 inputs but got 0 inputs for model 'add_sub'. Got input(s) [], but "
            f"missing required input(s) ['INPUT0','INPUT1']. {MISSING}",
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(1, 4), INPUT1=fp32(1, 4), X=fp32(1)),
            "[request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'add_sub'. Got input(s) "
            f"['INPUT0','INPUT1','X'], but missing required input(s) []. {MISSING}",
        ),
        (
            ADD_SUB,
            request(id="7", INPUT0=fp32(1, 4), X=fp32(1, 4)),
            "unexpected inference input 'X' for model 'add_sub'",
        ),
        (
            ADD_SUB,
            request(id="7", outputs=("OUTPUT0", "NOPE"), INPUT0=fp32(1, 4)),
            "unexpected inference output 'NOPE' for model 'add_sub'",
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(1, 4), INPUT1=fp32(2, 4)),
            "[request id: <id_unknown>] input 'INPUT1' batch size does not match other inputs for 'add_sub'",
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(33, 4), INPUT1=fp32(33, 4)),
            "[request id: <id_unknown>] inference request batch-size must be <= 32 for 'add_sub'",
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(0, 4), INPUT1=fp32(0, 4)),
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'add_sub'. Expected 16, "
            "got 0",
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(), INPUT1=fp32(2, 4)),
            "[request id: <id_unknown>] input 'INPUT0' has no shape but model requires batch dimension for 'add_sub'",
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(1, 4), INPUT1=fp32(1, 3)),
            expected_shape("INPUT1", "add_sub", "[-1,4]", "[1,3]") + NOTE,
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(4), INPUT1=fp32(4)),
            expected_shape("INPUT0", "add_sub", "[-1,4]", "[4]") + NOTE,
        ),
        (
            ADD_SUB,
            request(INPUT0=fp32(1, 4), INPUT1=np.zeros((1, 4), np.int64)),
            "[request id: <id_unknown>] inference input 'INPUT1' data-type is 'INT64', but model 'add_sub' expects "
            "'FP32'",
        ),
        (
            OPTIONAL,
            request(A=fp32(1, 2)),
            "[request id: <id_unknown>] expected number of inputs between 2 and 3 but got 1 inputs for model 'opt'. "
            f"Got input(s) ['A'], but missing required input(s) ['B']. {MISSING}",
        ),
        (
            OPTIONAL,
            request(A=fp32(1, 2), C=fp32(1, 2)),
            "[request id: <id_unknown>] expected number of inputs between 2 and 3 but got 2 inputs for model 'opt'. "
            f"Got input(s) ['A','C'], but missing required input(s) ['B']. {MISSING}",
        ),
        (OPTIONAL, request(A=fp32(1, 2), Z=fp32(1, 2)), "unexpected inference input 'Z' for model 'opt'"),
        (
            WILD,
            request(A=fp32(1, 3, 3), S=np.array([[b"x"]], object)),
            expected_shape("A", "wild", "[-1,-1,2]", "[1,3,3]") + NOTE,
        ),
        (
            WILD,
            request(A=fp32(1, 2), S=np.array([[b"x"]], object)),
            expected_shape("A", "wild", "[-1,-1,2]", "[1,2]") + NOTE,
        ),
        (PLAIN, request(A=fp32(1, 3)), expected_shape("A", "plain", "[3]", "[1,3]")),
        (PLAIN, request(A=fp32()), expected_shape("A", "plain", "[3]", "[]")),
    ],
)
def test_what_is_wrong_is_said_as_triton_says_it(config: str, wrong: InferRequest, text: str) -> None:
    assert refusal(config, wrong) == text


@pytest.mark.parametrize(
    ("config", "right", "size"),
    [
        (ADD_SUB, request(INPUT0=fp32(1, 4), INPUT1=fp32(1, 4)), 1),
        (ADD_SUB, request(INPUT1=fp32(32, 4), INPUT0=fp32(32, 4)), 32),
        (ADD_SUB, request(INPUT0=fp32(2, 4), INPUT1=fp32(2, 4), outputs=("OUTPUT1",)), 2),
        (OPTIONAL, request(A=fp32(3, 2), B=fp32(3, 2)), 3),
        (OPTIONAL, request(A=fp32(3, 2), B=fp32(3, 2), C=fp32(3, 2)), 3),
        (WILD, request(A=fp32(2, 7, 2), S=np.array([[b"x"], [b"y"]], object)), 2),
        (WILD, request(A=fp32(1, 0, 2), S=np.array([[b"x"]], object)), 1),
        (PLAIN, request(A=fp32(3)), 0),
        ('name: "none" max_batch_size: 2', request(), 1),
    ],
)
def test_right_requests_have_a_batch_size(config: str, right: InferRequest, size: int) -> None:
    assert check_request(right, ModelSignature(model_config(config))) == size


def test_requests_are_batched_only_with_their_like() -> None:
    signature = ModelSignature(model_config(WILD))
    assert not signature.uniform

    def key(rows: int, length: int) -> object:
        return signature.shapes(request(A=fp32(rows, length, 2), S=np.array([[b"x"]] * rows, object)).inputs)

    assert key(1, 5) == key(3, 5)
    assert key(1, 5) != key(1, 6)
    optional = ModelSignature(model_config(OPTIONAL))
    keys = [optional.shapes(request(**dict.fromkeys(names, fp32(1, 2))).inputs) for names in ("AB", "ABC", "AB")]
    assert keys[0] == keys[2] != keys[1]
    assert ModelSignature(model_config(ADD_SUB)).uniform


@pytest.mark.parametrize(
    ("dims", "reshape", "client", "model"),
    [
        ([1], [], (5, 1), (5,)),
        ([-1, 2], [2, -1], (1, 3, 2), (1, 2, 3)),
        ([-1, 4, -1], [2, -1, 2, -1], (2, 3, 4, 5), (2, 2, 3, 2, 5)),
        ([4], [1, 4], (1, 4), (1, 1, 4)),
    ],
)
def test_reshape_goes_both_ways(
    dims: list[int], reshape: list[int], client: tuple[int, ...], model: tuple[int, ...]
) -> None:
    tensor = f"data_type: TYPE_INT8 dims: {dims} reshape {{ shape: {reshape} }}"
    text = f'name: "r" max_batch_size: 8 input {{ name: "I" {tensor} }} output {{ name: "O" {tensor} }}'
    signature = ModelSignature(model_config(text))
    array = np.arange(np.prod(client), dtype=np.int8).reshape(client)
    taken = signature.to_model("I", array)
    assert taken.shape == model
    given = signature.to_client("O", taken)
    assert given.shape == client
    assert np.shares_memory(given, array)
    assert signature.to_client("other", array) is array


def test_a_signature_needs_data_types() -> None:
    with pytest.raises(ValueError, match="'A'"):
        ModelSignature(model_config('name: "m" input { name: "A" dims: [ 1 ] }'))


def test_a_wrong_key_of_the_inputs_is_an_unknown_name() -> None:
    wrong = InferRequest(inputs={"B": Tensor("A", "FP32", fp32(3))})
    assert refusal(PLAIN, wrong) == "unexpected inference input 'B' for model 'plain'"
