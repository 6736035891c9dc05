"""Request parameters: the reserved ones become fields of the request, the others go to the model.

Reserved names: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_parameters.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Raw

from penstock.classic.messages import InferRequest
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.bounded_json import decode_checked

MAX_MEMBERS = 1 << 14
"""Of all objects in a JSON request."""

_MAX_SEQUENCE_ID_CHARS = 128
_INT_RANGE = range(-(2**63), 2**64)


def from_json(value: Raw) -> object:
    """A parameter's value. None stands for objects and arrays, which none may be, as for null: they can be long."""
    text = bytes(value)
    return None if text[:1] in (b"[", b"{") else decode_checked(text, object)


def take_parameters(request: InferRequest, parameters: Mapping[str, object]) -> None:
    """Spreads what the caller sent over the request's fields. `binary_data_output` is the HTTP codec's own and goes
    no further. Raises InvalidRequestError for values of the wrong type or range, and for names that are not free."""
    for name, value in parameters.items():
        take = _RESERVED.get(name)
        if take is not None:
            take(request, name, value)
            continue
        if name.startswith("triton_"):
            raise InvalidRequestError(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
                param=name,
            )
        if isinstance(value, int) and value not in _INT_RANGE:
            raise InvalidRequestError(f"parameter '{name[:64]}' does not fit into 64 bits", param=name)
        if not isinstance(value, bool | int | float | str):
            raise InvalidRequestError(f"parameter '{name[:64]}' must be a boolean, a number or a string", param=name)
        request.parameters[name] = value


def _sequence_id(request: InferRequest, name: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > _MAX_SEQUENCE_ID_CHARS:
            raise InvalidRequestError(
                f"string correlation ID cannot be longer than {_MAX_SEQUENCE_ID_CHARS} characters", param=name
            )
        request.correlation_id = value
    else:
        request.correlation_id = _unsigned(name, value)


def _sequence_start(request: InferRequest, name: str, value: object) -> None:
    request.sequence_start = boolean(name, value)


def _sequence_end(request: InferRequest, name: str, value: object) -> None:
    request.sequence_end = boolean(name, value)


def _priority(request: InferRequest, name: str, value: object) -> None:
    request.priority = _unsigned(name, value)


def _timeout(request: InferRequest, name: str, value: object) -> None:
    request.timeout_us = _unsigned(name, value)


def _binary_data_output(request: InferRequest, name: str, value: object) -> None:
    boolean(name, value)


def _headers(request: InferRequest, name: str, value: object) -> None:
    raise InvalidRequestError(f"parameter '{name}' is reserved and should not be specified.", param=name)


_RESERVED: dict[str, Callable[[InferRequest, str, object], None]] = {
    "sequence_id": _sequence_id,
    "sequence_start": _sequence_start,
    "sequence_end": _sequence_end,
    "priority": _priority,
    "timeout": _timeout,
    "binary_data_output": _binary_data_output,
    "headers": _headers,
}
RESERVED = frozenset(_RESERVED)


def boolean(name: str, value: object) -> bool:
    """The value of a boolean parameter. Raises InvalidRequestError."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"parameter '{name}' must be a boolean", param=name)
    return value


def _unsigned(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise InvalidRequestError(f"parameter '{name}' must be an unsigned 64-bit integer", param=name)
    return value
