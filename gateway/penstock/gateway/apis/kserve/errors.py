"""Errors as Triton's fronts say them: its status codes, and `{"error": "..."}` as the body."""

from __future__ import annotations

import msgspec

from penstock.engines.errors import QueueFullError
from penstock.gateway.errors import HttpError, public_message, wire_shape

_HTTP = {"UNIMPLEMENTED": 501, "ALREADY_EXISTS": 400}
"""Where Triton's status differs from the table's. CANCELLED is 400 in both: only the caller itself can cancel over
HTTP, by leaving, so nobody is told but the caller of a model that gave up on its own."""


def kserve_status(error: Exception) -> int:
    """The HTTP status under /v2. Malformed JSON is a 400 here, as all bad input; Triton says 500."""
    shape = wire_shape(error)
    return shape.status if isinstance(error, HttpError) else _HTTP.get(shape.grpc, shape.status)


def kserve_error_body(error: Exception) -> bytes:
    return msgspec.json.encode({"error": public_message(error)})


def kserve_grpc_status(error: Exception) -> str:
    """The name of a grpc.StatusCode member. A full queue is UNAVAILABLE, as in Triton."""
    return "UNAVAILABLE" if isinstance(error, QueueFullError) else wire_shape(error).grpc


class KServeErrors:
    """The error form of all paths below /v2."""

    id_headers = (b"x-request-id",)

    def status(self, error: Exception) -> int:
        return kserve_status(error)

    def body(self, error: Exception, request_id: str) -> bytes:
        return kserve_error_body(error)

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return b"data: " + kserve_error_body(error) + b"\n\n"


KSERVE_ERRORS = KServeErrors()
