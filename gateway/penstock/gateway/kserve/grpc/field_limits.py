"""Of how many fields a ModelInferRequest is made, counted before it is parsed.

Two bytes are an empty input or output on the wire and hundreds in memory: a message of 60 MiB could ask for gigabytes,
and for the event loop for half a minute, before anything in it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from penstock.classic.tensors import MAX_DIMS
from penstock.engines.errors import InvalidRequestError

MAX_FIELDS = 1 << 14
"""Of a message, of its inputs, outputs and parameters. What lies in `contents` is data, as in `raw_input_contents`."""

_PARAMETERS, _INPUTS, _OUTPUTS = 4, 5, 6
_SHAPE = 3
_MAX_VARINT = 10
_MAX_SHAPE_BYTES = MAX_DIMS * _MAX_VARINT


def check_fields(data: bytes) -> None:
    """Raises InvalidRequestError for too many fields and dimensions, DecodeError for what is no message."""
    left = MAX_FIELDS
    for number, start, end in _fields(data, 0, len(data)):
        left -= 1
        if number in (_PARAMETERS, _INPUTS, _OUTPUTS):
            for inner, first, last in _fields(data, start, end):
                left -= 1
                if left < 0:
                    break
                if number == _INPUTS and inner == _SHAPE and last - first > _MAX_SHAPE_BYTES:
                    raise InvalidRequestError(f"an input has more than {MAX_DIMS} dimensions")
        if left < 0:
            raise InvalidRequestError(f"the request has more than {MAX_FIELDS} fields")


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field, and where its content begins and ends."""
    while position < end:
        tag, start = varint(data, position)
        match tag & 7:
            case 0:
                _, position = varint(data, start)
            case 1:
                position = start + 8
            case 2:
                size, start = varint(data, start)
                position = start + size
            case 5:
                position = start + 4
            case _:  # groups: no field of ours is one, and they could hide what stands behind them
                raise DecodeError
        if position > end:
            raise DecodeError
        yield tag >> 3, start, position


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The number and the position behind it. Raises DecodeError."""
    if position < len(data) and data[position] < 0x80:
        return data[position], position + 1
    value = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise DecodeError
