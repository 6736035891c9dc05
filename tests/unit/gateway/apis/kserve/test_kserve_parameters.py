"""Reserved request parameters become fields; the rest goes to the model; bad values are refused."""

from __future__ import annotations

import pytest

from penstock.classic.messages import InferRequest
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.parameters import take_parameters


def taken(**parameters: object) -> InferRequest:
    request = InferRequest(inputs={})
    take_parameters(request, parameters)
    return request


def test_reserved_parameters_become_fields() -> None:
    request = taken(sequence_id=7, sequence_start=True, sequence_end=False, priority=2, timeout=5000)
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == (7, True, False)
    assert (request.priority, request.timeout_us) == (2, 5000)
    assert request.parameters == {}


def test_a_sequence_may_have_a_name() -> None:
    assert taken(sequence_id="a" * 128).correlation_id == "a" * 128


def test_other_parameters_go_to_the_model() -> None:
    free = {"flag": True, "count": -3, "ratio": 0.5, "text": "x", "big": 2**64 - 1}
    assert taken(**free).parameters == free
    assert type(taken(flag=True).parameters["flag"]) is bool


def test_binary_data_output_stays_with_the_codec() -> None:
    assert taken(binary_data_output=True).parameters == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_id", -1),
        ("sequence_id", 2**64),
        ("sequence_id", 1.0),
        ("sequence_id", True),
        ("sequence_id", "a" * 129),
        ("sequence_id", None),
        ("sequence_start", 1),
        ("sequence_end", "true"),
        ("priority", -1),
        ("priority", True),
        ("priority", "1"),
        ("timeout", -1),
        ("timeout", 2**64),
        ("timeout", 0.5),
        ("binary_data_output", 1),
        ("headers", "x"),
        ("triton_final_response", True),
        ("triton_", 1),
        ("mine", None),
        ("mine", [1]),
        ("mine", {"a": 1}),
        ("mine", 2**64),
        ("mine", -(2**63) - 1),
    ],
)
def test_bad_parameters_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        taken(**{name: value})
    assert caught.value.param == name


def test_the_prefix_is_refused_in_tritons_words() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        taken(triton_x=1)
    assert caught.value.message == (
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
    )
