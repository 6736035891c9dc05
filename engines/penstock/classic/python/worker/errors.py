"""TritonError, TritonModelException, and how errors travel."""

from __future__ import annotations

import contextlib
import enum
import sys
import traceback

from .arguments import clean, of_type, text


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
