"""The kinds of failed requests, in words that reports count by, and the errors that make a whole run impossible."""

from __future__ import annotations

CONNECT = "connect"
"""No connection, or it was lost before a byte of the answer."""
TIMEOUT = "timeout"
TRUNCATED = "truncated"
"""The answer ended without its end: a connection cut in the middle, a stream without finish reason or [DONE], an answer
that the server says it gave up."""
MALFORMED = "malformed"
"""Not what the protocol promises."""
STREAM_ERROR = "stream_error"
"""An error event within a stream that had begun with status 200."""
INTERRUPTED = "interrupted"
"""The run was ended while the request was on its way. Neither completed nor failed: left out of every figure."""


UNREADABLE = (ValueError, RecursionError)
"""What taking apart a stranger's bytes raises: decoders have ValueErrors, and another where JSON nests too deep."""


def http_error(status: int) -> str:
    """The kind of an answer with an HTTP status other than 200: `http_503`."""
    return f"http_{status}"


def grpc_error(code: str) -> str:
    """The kind of a gRPC status: `grpc_UNAVAILABLE`."""
    return f"grpc_{code}"


class LoadTestError(Exception):
    """A run that cannot be: options that contradict each other, a file that cannot be read, no server."""


class UsageError(LoadTestError):
    """Settings that cannot be, as they were given."""
