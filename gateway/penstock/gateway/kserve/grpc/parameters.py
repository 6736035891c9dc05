"""InferParameter maps to Python values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.classic.messages import InferRequest, Parameter
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.kserve.parameters import take_parameters

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

ParameterMap = Mapping[str, Any]
"""A protobuf map of `inference.InferParameter`."""


def read_parameters(parameters: ParameterMap) -> dict[str, Parameter]:
    """Raises InvalidRequestError for a parameter without a value."""
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequestError(
                f"invalid value type for '{name[:64]}' parameter, expected int64_param, bool_param, or string_param.",
                param=name,
            )
        found[name] = getattr(parameter, kind)
    return found


def take_request_parameters(request: InferRequest, parameters: ParameterMap) -> bool:
    """Spreads them over the request; True when the caller asks for an empty response at the end.

    Raises InvalidRequestError.
    """
    values: dict[str, Any] = read_parameters(parameters)
    empty_final = values.pop(EMPTY_FINAL, False)
    if not isinstance(empty_final, bool):
        raise InvalidRequestError(f"invalid value type for '{EMPTY_FINAL}' parameter, expected bool_param.")
    for name in values:
        if name.startswith("triton_"):
            raise InvalidRequestError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}",
                param=name,
            )
    take_parameters(request, values)
    return empty_final


def write_parameters(parameters: ParameterMap, values: Mapping[str, Parameter]) -> None:
    """Fills the map; integers beyond 63 bits go as uint64."""
    for name, value in values.items():
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            if value < 2**63:
                parameter.int64_param = value
            else:
                parameter.uint64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value
