"""The elements of a tensor as JSON: what stands in `data`, flat or nested, of every datatype.

Sizes are compared before anything is decoded; long data is decoded and encoded in pieces, so that the Python objects in
between never outgrow the tensor by much. JSON knows neither NaN nor infinities: they are refused on the way in (the
binary form carries them), and are `null` on the way out, which Triton's clients read as NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor, element_count
from penstock.engines.errors import InvalidRequestError

LONG = 1 << 16
"""Elements that are decoded or encoded in one piece."""

_PIECE_BYTES = 1 << 18
_BLANK = b"[], \t\r\n"
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_STRINGS = "it has elements that are not strings"

_Decode = Callable[[bytes], list[Any]]
_floats: _Decode = msgspec.json.Decoder(list[float]).decode
_ints: _Decode = msgspec.json.Decoder(list[int]).decode
_bools: _Decode = msgspec.json.Decoder(list[bool]).decode
_strings: _Decode = msgspec.json.Decoder(list[str]).decode
_anything: _Decode = msgspec.json.Decoder(list[Any]).decode
_encode = msgspec.json.Encoder().encode

_NUMBERS: dict[str, _Decode] = {
    datatype: _bools if dtype.kind == "b" else _ints if dtype.kind in "iu" else _floats
    for datatype, dtype in NUMPY_TYPES.items()
    if datatype != "BYTES"
}


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: msgspec.Raw) -> Tensor:
    """The tensor of an input's `data`. How it is nested is not looked at, as in Triton: only the number of elements
    must be that of the shape. Raises InvalidRequestError."""
    count = element_count(shape, name)
    text = bytes(data)
    try:
        if text[:1] != b"[":
            raise _unfit(name, "it is not an array")
        array = _bytes(text, count, name) if datatype == "BYTES" else _numbers(text, count, name, datatype)
    except msgspec.MsgspecError as error:
        raise _unfit(name, _reason(error)) from None
    except (UnicodeDecodeError, RecursionError):
        raise _unfit(name, "it cannot be decoded") from None
    except (OverflowError, FloatingPointError):
        raise _unfit(name, f"a value is out of the range of {datatype}") from None
    return Tensor(name, datatype, shaped(array, shape, name))


def shaped(array: Array, shape: tuple[int, ...], name: str) -> Array:
    """The array in this shape, whose elements have been counted. Raises InvalidRequestError for shapes that numpy
    cannot have."""
    try:
        return array.reshape(shape)
    except ValueError:
        raise InvalidRequestError(f"the shape of input '{name}' has too many or too large dimensions") from None


def to_json(tensor: Tensor) -> list[Any] | msgspec.Raw:
    """The flat elements, for msgspec to encode. Raises InvalidRequestError for BYTES that are no UTF-8 text."""
    flat = tensor.array.reshape(-1)
    if tensor.datatype in ("FP16", "BF16"):
        flat = flat.astype(np.float32)
    if flat.size <= LONG:
        return _elements(tensor, flat)
    pieces = (flat[start : start + LONG] for start in range(0, flat.size, LONG))
    return msgspec.Raw(b"[" + b",".join(_encode(_elements(tensor, piece))[1:-1] for piece in pieces) + b"]")


def _elements(tensor: Tensor, flat: Array) -> list[Any]:
    values: list[Any] = flat.tolist()
    if tensor.datatype != "BYTES":
        return values
    try:
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"output '{tensor.name}' holds bytes that are not UTF-8 text: ask for it as binary data"
        ) from None


def _numbers(text: bytes, count: int, name: str, datatype: str) -> Array:
    decode = _NUMBERS.get(datatype)
    if decode is None:
        raise InvalidRequestError(f"invalid datatype for input {name}")
    dtype = NUMPY_TYPES[datatype]
    if count == 0:
        if text.translate(None, _BLANK):
            raise _wrong_count(name)
        return np.empty(0, dtype)
    if text.count(b",") + 1 != count:  # exact for numbers: anything else that holds a comma is refused below
        raise _wrong_count(name)
    if text.find(b"[", 1) > 0:
        text = b"[" + text.translate(None, b"[]") + b"]"
    if count <= LONG:
        values = decode(text)
        if len(values) != count:
            raise _wrong_count(name)
        return _converted(values, dtype)
    numbers = np.empty(count, dtype)
    filled = 0
    for piece in _pieces(text):
        values = decode(piece)
        numbers[filled : filled + len(values)] = _converted(values, dtype)
        filled += len(values)
    if filled != count:
        raise _wrong_count(name)
    return numbers


def _pieces(text: bytes) -> Iterator[bytes]:
    """A flat array as several shorter ones, cut at commas."""
    start, end = 1, len(text) - 1
    while start <= end:
        cut = text.find(b",", min(start + _PIECE_BYTES, end), end)
        cut = end if cut < 0 else cut
        yield b"[" + text[start:cut] + b"]"
        start = cut + 1


def _converted(values: list[Any], dtype: np.dtype[Any]) -> Array:
    """Raises OverflowError and FloatingPointError for values out of range."""
    if dtype.kind in "iub" or dtype.itemsize == 8:
        return np.array(values, dtype)
    with np.errstate(over="raise"):
        array = np.array(values, dtype)
    if dtype.kind != "f" and np.isinf(array).any():  # bfloat16 overflows in silence
        raise OverflowError
    return array


def _bytes(text: bytes, count: int, name: str) -> Array:
    elements = _STRING.subn(b"", text)[1] if b"\\" in text else text.count(b'"') // 2
    if elements != count:
        raise _unfit(name, _NOT_STRINGS) if _has_others(text) else _wrong_count(name)
    values = _flat_strings(text, name) if text.find(b"[", 1) > 0 else _strings(text)
    if len(values) != count:
        raise _wrong_count(name)
    array = np.empty(count, np.object_)
    array[:] = [value.encode() for value in values]
    return array


def _flat_strings(text: bytes, name: str) -> list[str]:
    """The strings of an array in which there are other arrays, or strings with brackets."""
    values = list(_leaves(_anything(text)))
    if not all(isinstance(value, str) for value in values):
        raise _unfit(name, _NOT_STRINGS)
    return values


def _has_others(text: bytes) -> bool:
    """There is something beside strings and arrays: numbers, `true`, `null`, objects."""
    return bool(_STRING.sub(b"", text).translate(None, b"[], \t\r\n"))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value)
        else:
            yield value


def _reason(error: Exception) -> str:
    text = str(error).partition(" - at ")[0]
    return f"{text[:1].lower()}{text[1:]}"


def _unfit(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Unable to parse 'data': {why} (input '{name[:128]}')")


def _wrong_count(name: str) -> InvalidRequestError:
    return _unfit(name, "Shape does not match true shape of 'data' field")
