"""TritonError, TritonModelException, how errors travel, and arguments checked as in Triton's: TypeError for values of
another type.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import sys
import traceback
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


class ErrorCode(enum.IntEnum):
    """TRITONSERVER_Error_Code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """What went wrong with one response."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str | bytes, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = text(message, "message")
        self._code = of_type(code, ErrorCode, "code")

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by the functions of triton_python_backend_utils, and by models."""

    def message(self) -> str:
        return str(self)


class MisusedError(Exception):
    """What the backend itself finds wrong with a model. Callers see the text alone."""


def public_text(error: BaseException) -> str:
    """`ValueError: text`, as callers see it: no traceback and no paths of ours."""
    if isinstance(error, MisusedError):
        return str(error)
    lines = "".join(traceback.format_exception_only(type(error), error)).strip()
    module = type(error).__module__
    if not isinstance(error, SyntaxError) and module not in ("builtins", "__main__"):
        lines = lines.removeprefix(f"{module}.")
    if isinstance(error, SyntaxError):  # its usual form shows the file and the line
        lines = f"{type(error).__name__}: {error.msg}"
    return clean(lines)


def report(error: BaseException, headline: str = "") -> None:
    """Into the log: the traceback. A model may have closed or replaced stderr, and what it put there may raise."""
    with contextlib.suppress(BaseException):
        if headline:
            print(headline, file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()
