"""The one table from error classes to the wire: HTTP status, OpenAI type and code, gRPC status name.

Fronts raise errors of `penstock.engines.errors` (and `HttpError` for what only HTTP
knows) and look here for how to say it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from penstock.engines import errors as tree
from penstock.engines.errors import PenstockError

INTERNAL_MESSAGE = "The server had an error while processing the request."
_MAX_MESSAGE_CHARS = 512
_MAX_PARAM_CHARS = 128


@dataclass(frozen=True, slots=True)
class WireShape:
    """How one class of errors looks outside."""

    status: int
    type: str
    code: str | None
    grpc: str
    """Name of a grpc.StatusCode member."""


class HttpError(PenstockError):
    """A refusal that only HTTP knows: no such route, wrong method, unknown encoding, headers too large."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.shape = WireShape(status, "invalid_request_error", code, "INVALID_ARGUMENT")
        self.headers = headers


class RestrictedApiError(tree.PermissionDeniedError):
    """The header is missing that `--http-restricted-api` or `--grpc-restricted-protocol` asks for."""

    code = "restricted_api"


class BudgetSpentError(tree.RateLimitedError):
    """The key has had the tokens that it gets in a day or a month."""

    code = "insufficient_quota"


class PreviousResponseError(tree.InvalidRequestError):
    """There is no response that a request could go on from. OpenAI answers 400, and agents know the code."""

    code = "previous_response_not_found"


class UpstreamError(tree.EngineError):
    """The other server that has the model failed, or answered what nobody can read."""

    code = "upstream_error"


class UpstreamTimeoutError(UpstreamError):
    code = "upstream_timeout"


class UpstreamUnavailableError(tree.OverloadedError):
    """No other server that has the model can take the request now."""

    code = "upstream_unavailable"


class UpstreamRateLimitedError(tree.OverloadedError):
    """The other server lets this one ask no more for now."""

    code = "upstream_rate_limited"


_CLIENT = "invalid_request_error"
_OVERLOAD = "overloaded_error"
_SERVER = "server_error"

_TABLE: dict[type[Exception], WireShape] = {
    tree.InvalidRequestError: WireShape(400, _CLIENT, None, "INVALID_ARGUMENT"),
    tree.ContextLengthError: WireShape(400, _CLIENT, "context_length_exceeded", "INVALID_ARGUMENT"),
    tree.NotFoundError: WireShape(404, _CLIENT, "not_found", "NOT_FOUND"),
    PreviousResponseError: WireShape(400, _CLIENT, "previous_response_not_found", "NOT_FOUND"),
    tree.AlreadyExistsError: WireShape(409, _CLIENT, "already_exists", "ALREADY_EXISTS"),
    tree.ModelNotFoundError: WireShape(404, _CLIENT, "model_not_found", "NOT_FOUND"),
    tree.PayloadTooLargeError: WireShape(413, _CLIENT, "payload_too_large", "RESOURCE_EXHAUSTED"),
    tree.UnsupportedError: WireShape(400, _CLIENT, "unsupported_parameter", "UNIMPLEMENTED"),
    tree.AuthenticationError: WireShape(401, "authentication_error", "invalid_api_key", "UNAUTHENTICATED"),
    tree.PermissionDeniedError: WireShape(403, "permission_error", "permission_denied", "PERMISSION_DENIED"),
    RestrictedApiError: WireShape(403, "permission_error", "restricted_api", "UNAVAILABLE"),
    tree.RateLimitedError: WireShape(429, "rate_limit_error", "rate_limit_exceeded", "RESOURCE_EXHAUSTED"),
    BudgetSpentError: WireShape(429, "insufficient_quota", "insufficient_quota", "RESOURCE_EXHAUSTED"),
    UpstreamError: WireShape(502, _SERVER, "upstream_error", "UNAVAILABLE"),
    UpstreamTimeoutError: WireShape(504, "timeout_error", "upstream_timeout", "UNAVAILABLE"),
    UpstreamUnavailableError: WireShape(503, _OVERLOAD, "upstream_unavailable", "UNAVAILABLE"),
    UpstreamRateLimitedError: WireShape(429, "rate_limit_error", "upstream_rate_limited", "RESOURCE_EXHAUSTED"),
    tree.OverloadedError: WireShape(503, _OVERLOAD, "overloaded", "UNAVAILABLE"),
    tree.QueueFullError: WireShape(503, _OVERLOAD, "queue_full", "RESOURCE_EXHAUSTED"),
    tree.QueueTimeoutError: WireShape(503, _OVERLOAD, "queue_timeout", "UNAVAILABLE"),
    tree.MemoryBudgetError: WireShape(503, _OVERLOAD, "memory_budget", "RESOURCE_EXHAUSTED"),
    tree.NotReadyError: WireShape(503, _OVERLOAD, "not_ready", "UNAVAILABLE"),
    tree.DeadlineExceededError: WireShape(504, "timeout_error", "deadline_exceeded", "DEADLINE_EXCEEDED"),
    tree.CancelledError: WireShape(400, _CLIENT, "cancelled", "CANCELLED"),
    tree.UnknownError: WireShape(400, _CLIENT, "unknown", "UNKNOWN"),
    tree.EngineError: WireShape(500, _SERVER, "engine_error", "INTERNAL"),
    tree.EngineDeadError: WireShape(503, _SERVER, "engine_dead", "UNAVAILABLE"),
    tree.StepFailedError: WireShape(500, _SERVER, "step_failed", "INTERNAL"),
    tree.NumericalError: WireShape(500, _SERVER, "numerical_error", "INTERNAL"),
    Exception: WireShape(500, _SERVER, "internal_error", "INTERNAL"),
}


def drop_traceback(error: Exception) -> None:
    """Once the client has its answer. The frames of a traceback hold the error that holds the traceback: each refused
    request would leave a cycle, and the garbage collector stops every other request while it looks for those."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def wire_shape(error: Exception) -> WireShape:
    """The nearest entry of the table; anything outside the tree is an internal error."""
    if isinstance(error, HttpError):
        return error.shape
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def public_message(error: Exception) -> str:
    """The text for the caller: nothing of exceptions outside the tree, and never more than 512 characters."""
    message = error.message if isinstance(error, PenstockError) else INTERNAL_MESSAGE
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[: _MAX_MESSAGE_CHARS - 1] + "…"


def error_json(error: Exception) -> bytes:
    """The OpenAI error object, `{"error": {...}}`; below 4 KiB whatever the message holds."""
    shape = wire_shape(error)
    param = error.param if isinstance(error, PenstockError) else None
    body = {
        "message": public_message(error),
        "type": shape.type,
        "param": param[:_MAX_PARAM_CHARS] if param else None,
        "code": shape.code,
    }
    return msgspec.json.encode({"error": body})


def error_headers(error: Exception) -> list[tuple[bytes, bytes]]:
    """Headers that belong to the error: Retry-After for overload, WWW-Authenticate for a missing key."""
    if isinstance(error, HttpError):
        return list(error.headers)
    if isinstance(error, tree.AuthenticationError):
        return [(b"www-authenticate", b"Bearer")]
    retry_after = error.retry_after if isinstance(error, PenstockError) else None
    if retry_after is None and not isinstance(error, tree.OverloadedError):
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(retry_after or 1)))]
