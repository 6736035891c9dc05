"""Frames as a client of HTTP/2 sends them, and what a connection makes of them."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import FrameType
from penstock.gateway.transports.http2.heads import Event
from penstock.gateway.transports.http2.hpack import encode_fields

REQUEST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"x"))
END = frames.END_STREAM
WHOLE = frames.END_HEADERS


def headers(
    stream_id: int = 1, fields: Iterable[tuple[bytes, bytes]] = REQUEST, *, end: bool = False, flags: int = WHOLE
) -> bytes:
    return frames.frame(FrameType.HEADERS, flags | (END if end else 0), stream_id, encode_fields(fields))


def data(stream_id: int, payload: bytes, *, end: bool = False) -> bytes:
    return frames.frame(FrameType.DATA, END if end else 0, stream_id, payload)


def begin(client_settings: dict[frames.Setting, int] | None = None) -> bytes:
    """What every client sends first."""
    return frames.PREFACE + frames.settings(client_settings or {})


def started(
    client_settings: dict[frames.Setting, int] | None = None, limits: Http2Limits | None = None
) -> Http2Connection:
    """A connection that has been begun; what it has said by itself is taken."""
    connection = Http2Connection(limits or Http2Limits(), 0.0)
    assert connection.receive(begin(client_settings), 0.0) == []
    connection.take_output()
    return connection


def read_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Type, flags, stream, payload of whole frames."""
    found = []
    while data:
        word, flags, stream_id = frames.HEADER.unpack_from(data)
        end = frames.HEADER_BYTES + (word >> 8)
        assert end <= len(data), "a frame is cut"
        found.append((word & 0xFF, flags, stream_id, data[frames.HEADER_BYTES : end]))
        data = data[end:]
    return found


def output(connection: Http2Connection) -> list[tuple[int, int, int, bytes]]:
    return read_frames(connection.take_output()[0])


def names(events: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in events]
