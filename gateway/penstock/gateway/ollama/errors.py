"""Errors as Ollama says them: one text."""

from __future__ import annotations

import msgspec

from penstock.gateway.errors import public_message, wire_shape


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


def has_path(path: str) -> bool:
    """Whether this API answers there, if only that there is nothing."""
    return path.startswith("/api/")
