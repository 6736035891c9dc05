"""Arguments of pb_utils' functions, checked as in Triton's: TypeError for values of another type."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def clean(text: object) -> str:
    """As a message can carry it: without lone surrogates, which file names and the like may have."""
    return str(text).encode("utf-8", "replace").decode()


def text(value: object, what: str) -> str:
    """Also from bytes, as in Triton: elements of BYTES tensors are names there."""
    if type(value) is str and value.isascii():
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, not {type(value).__name__}")
    return clean(value)


def integer(value: Any, what: str, bits: int, *, signed: bool = False) -> int:
    """Of any type that is an integer, numpy's too; it has to fit so many bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}") from None
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    if not low <= number < high:
        raise TypeError(f"{what} is {number}, and must be from {low} to {high - 1}")
    return number


def flag(value: Any, what: str) -> bool:
    if value is None or not hasattr(type(value), "__bool__"):
        raise TypeError(f"{what} must be true or false, not {type(value).__name__}")
    return bool(value)


def items(value: Any, what: str) -> Sequence[Any]:
    """A list or the like: no text, and nothing that can be read only once or has no order."""
    if isinstance(value, list | tuple):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{what} must be a list, not {type(value).__name__}")
    return value


def of_type(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be {kind.__name__}, not {type(value).__name__}")
    return value
