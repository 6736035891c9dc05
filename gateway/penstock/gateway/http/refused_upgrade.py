"""Bodies of requests that ask for another protocol, which this server goes on as if they had not.

httptools takes what follows the head of such a request for the other protocol. It is the request's body first
(RFC 9110, 7.8), so another parser reads that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


def framing(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The header lines that say how long the body is; empty where there is none."""
    return b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers if name in _FRAMING])


class BodyReader(Protocol):
    def on_body(self, body: bytes) -> None: ...
    def on_chunk_header(self) -> None: ...
    def on_message_complete(self) -> None: ...


class BodyOnly:
    """Callbacks of a parser whose head is not the client's."""

    def __init__(self, reader: BodyReader) -> None:
        self.on_body = reader.on_body
        self.on_chunk_header = reader.on_chunk_header
        self.on_message_complete = reader.on_message_complete
