"""Errors as Ollama says them: one text."""

from __future__ import annotations

import msgspec

from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.transports.http.routes import Api


class OllamaErrors:
    """The error form of all paths of this API."""

    id_headers = (b"x-request-id",)

    def status(self, error: Exception) -> int:
        return wire_shape(error).status

    def body(self, error: Exception, request_id: str) -> bytes:
        return msgspec.json.encode({"error": public_message(error)})

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return self.body(error, request_id) + b"\n"


OLLAMA_ERRORS = OllamaErrors()
OLLAMA = Api("ollama", OLLAMA_ERRORS, prefix="/api")
