"""Errors as the Messages API says them: https://docs.anthropic.com/en/api/errors."""

from __future__ import annotations

import msgspec

from penstock.engines.errors import NotReadyError, PenstockError, UnsupportedError
from penstock.gateway.apis.anthropic.schemas import THREAD
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.transports.http.routes import Api

_BUSY = 529
_OVERLOADED = "overloaded_error"
_NO_THREADS = {"error_code": "thread_unsupported_request"}
"""Anthropic's tool runner then sends the whole conversation instead."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class AnthropicErrors:
    """The error form of all paths of this API."""

    id_headers = (b"request-id", b"x-request-id")

    def status(self, error: Exception) -> int:
        """Anthropic has a status of its own for a server with too much to do. One that is not ready says 503, which
        makes load balancers try another."""
        shape = wire_shape(error)
        return _BUSY if shape.type == _OVERLOADED and not isinstance(error, NotReadyError) else shape.status

    def body(self, error: Exception, request_id: str) -> bytes:
        shown: dict[str, object] = {"type": _type(error), "message": _message(error)}
        if isinstance(error, UnsupportedError) and error.param == THREAD:
            shown["details"] = _NO_THREADS
        return msgspec.json.encode({"type": "error", "error": shown, "request_id": request_id})

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


def _message(error: Exception) -> str:
    """Names the field, for which this form has no place of its own."""
    message = public_message(error)
    param = error.param if isinstance(error, PenstockError) else None
    return message if param is None or param in message else f"{param}: {message}"


ANTHROPIC_ERRORS = AnthropicErrors()
ANTHROPIC = Api("anthropic", ANTHROPIC_ERRORS, prefix="/v1/messages")


def _type(error: Exception) -> str:
    shape = wire_shape(error)
    if shape.type == _OVERLOADED:
        return _OVERLOADED
    return _TYPES.get(shape.status, "invalid_request_error" if shape.status < 500 else "api_error")
