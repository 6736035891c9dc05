"""Parameters of requests, of JSON, protobuf and forwarded headers: the reserved ones become fields of the request, the
others go to the model.

Reserved names: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_parameters.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Raw

from penstock.classic.messages import InferRequest, Parameter
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.requests.bounded_json import decode_checked

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


# Headers that go to the model as parameters (`--http-header-forward-pattern` and its gRPC twin)

MAX_PATTERN = 512
MAX_HEADERS = 64
"""That a request may forward."""

_MAX_NAME = 128
"""Longer names match no pattern."""
_MAX_REPEATS = 2
"""Of unbounded length, in one alternative: with the length of names they bound the time that matching takes."""
_CASE = "(?-i)"
_NOT_LINEAR = re.compile(r"\\[1-9]|\(\?(?!:|P<|i\))|[*+?}]\+|\)(?:[*+]|\{)")
"""Repeated groups, and the back references, look-arounds and the rest that RE2, whose syntax Triton takes, lacks."""
_REPEAT = re.compile(r"[*+]|\{\d*,\d*\}")


class NeverMatches(ValueError):
    """A pattern that no name of a header can match."""


def forward_pattern(text: str) -> re.Pattern[str] | None:
    """The pattern of an operator's setting; None for an empty one.

    It has to match the whole name of a header, whatever its case unless it begins with `(?-i)`. Raises ValueError when
    it is no regular expression and when matching it could take long, NeverMatches when it could never match.
    """
    if not text:
        return None
    pattern = text.removeprefix(_CASE)
    plain = re.sub(r"\\[^1-9]", "x", pattern)
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a header pattern may have at most {MAX_PATTERN} characters")
    if _NOT_LINEAR.search(plain):
        raise ValueError(f"the header pattern '{text}' has repeated groups, back references or look-arounds")
    if any(len(_REPEAT.findall(branch)) > _MAX_REPEATS for branch in plain.split("|")):
        raise ValueError(f"the header pattern '{text}' has more than {_MAX_REPEATS} repeats in one alternative")
    if text.startswith(_CASE) and plain != plain.lower():
        raise NeverMatches(f"the header pattern '{text}' never matches: names of headers arrive in small letters")
    try:
        return re.compile(pattern, 0 if text.startswith(_CASE) else re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the header pattern '{text}' is no regular expression: {error}") from None


def forwarded(headers: Iterable[tuple[str, str]], pattern: re.Pattern[str]) -> dict[str, str]:
    """The matching headers (or metadata) as parameters; of several with one name the first.

    Raises InvalidRequestError for names that are reserved as parameters, and for too many headers.
    """
    parameters: dict[str, str] = {}
    for name, value in headers:
        if len(name) > _MAX_NAME or pattern.fullmatch(name) is None:
            continue
        if name in RESERVED or name.startswith("triton_"):
            raise InvalidRequestError(f"the header '{name}' cannot be forwarded: its name is reserved as a parameter")
        parameters.setdefault(name, value)
        if len(parameters) > MAX_HEADERS:
            raise InvalidRequestError(f"a request may forward at most {MAX_HEADERS} headers")
    return parameters


def forwarded_http(headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[str]) -> dict[str, str]:
    """`forwarded` for the headers of an ASGI scope."""
    return forwarded(((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers), pattern)


# Protobuf maps of InferParameter

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

ParameterMap = Mapping[str, Any]
"""A protobuf map of `inference.InferParameter`."""


def read_parameters(parameters: ParameterMap) -> dict[str, Parameter]:
    """Raises InvalidRequestError for a parameter without a value."""
    values: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequestError(
                f"invalid value type for '{name[:64]}' parameter, expected int64_param, bool_param, or string_param.",
                param=name,
            )
        values[name] = getattr(parameter, kind)
    return values


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
