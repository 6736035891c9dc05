"""Errors as gRPC statuses."""

from __future__ import annotations

import grpc

from penstock.engines.errors import NotReadyError
from penstock.gateway.errors import public_message
from penstock.gateway.kserve.errors import kserve_grpc_status

_CODES = {code.name: code for code in grpc.StatusCode}


def status(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Code and details; the latter hold nothing of exceptions outside the tree of errors."""
    return _CODES[kserve_grpc_status(error)], public_message(error)


def shutting_down() -> NotReadyError:
    return NotReadyError("GRPC server is shutting down and has stopped accepting new requests.")
