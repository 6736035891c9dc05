"""TritonError codes and our errors."""

from __future__ import annotations

from penstock.classic.python.worker.errors import ErrorCode
from penstock.engines import errors as tree
from penstock.engines.errors import PenstockError

_CLASSES: dict[int, type[PenstockError]] = {
    ErrorCode.UNKNOWN: tree.UnknownError,
    ErrorCode.INTERNAL: tree.EngineError,
    ErrorCode.NOT_FOUND: tree.NotFoundError,
    ErrorCode.INVALID_ARG: tree.InvalidRequestError,
    ErrorCode.UNAVAILABLE: tree.OverloadedError,
    ErrorCode.UNSUPPORTED: tree.UnsupportedError,
    ErrorCode.ALREADY_EXISTS: tree.AlreadyExistsError,
    ErrorCode.CANCELLED: tree.CancelledError,
}

# from the special to the general: the first class that fits is the one
_CODES: tuple[tuple[type[PenstockError], ErrorCode], ...] = (
    (tree.UnsupportedError, ErrorCode.UNSUPPORTED),
    (tree.AlreadyExistsError, ErrorCode.ALREADY_EXISTS),
    (tree.NotFoundError, ErrorCode.NOT_FOUND),
    (tree.InvalidRequestError, ErrorCode.INVALID_ARG),
    (tree.OverloadedError, ErrorCode.UNAVAILABLE),
    (tree.EngineDeadError, ErrorCode.UNAVAILABLE),
    (tree.DeadlineExceededError, ErrorCode.UNAVAILABLE),
    (tree.CancelledError, ErrorCode.CANCELLED),
    (tree.UnknownError, ErrorCode.UNKNOWN),
)


def to_error(fields: list[object]) -> PenstockError:
    """Our error for `[code, message]` of a response."""
    code, message = fields
    return _CLASSES.get(int(str(code)), tree.EngineError)(str(message))


def to_fields(error: Exception) -> list[object]:
    """`[code, message]` for an error of ours; nothing of any other exception but that it happened."""
    if not isinstance(error, PenstockError):
        return [int(ErrorCode.INTERNAL), "The server had an error while processing the request."]
    code = next((code for cls, code in _CODES if isinstance(error, cls)), ErrorCode.INTERNAL)
    return [int(code), error.message]
