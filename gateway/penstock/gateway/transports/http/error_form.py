"""Forms of errors in HTTP answers. Each protocol has its own; what belongs to none has OpenAI's."""

from __future__ import annotations

from typing import Protocol

from penstock.gateway.errors import error_json, wire_shape


class ErrorForm(Protocol):
    @property
    def id_headers(self) -> tuple[bytes, ...]:
        """Headers in which every answer, also a good one, has the request's id."""
        ...

    def status(self, error: Exception) -> int: ...

    def body(self, error: Exception, request_id: str) -> bytes:
        """JSON; below 4 KiB whatever the message holds."""
        ...

    def last_events(self, error: Exception, request_id: str) -> bytes:
        """The end of a stream that had begun."""
        ...


class OpenAIErrors:
    id_headers = (b"x-request-id",)

    def status(self, error: Exception) -> int:
        return wire_shape(error).status

    def body(self, error: Exception, request_id: str) -> bytes:
        return error_json(error)

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return b"data: " + error_json(error) + b"\n\ndata: [DONE]\n\n"


OPENAI_ERRORS = OpenAIErrors()
