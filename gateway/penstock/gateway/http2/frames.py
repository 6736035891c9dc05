"""The frames of RFC 9113, section 4 and 6, as bytes."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16_384
"""Of a payload, as long as nobody says otherwise."""
OWN_MAX_FRAME_BYTES = 1 << 20
"""What this server says, for the sake of long bodies: each frame costs about as much as a few hundred kilobytes."""
LARGEST_FRAME_BYTES = 2**24 - 1
DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
HEADER_BYTES = 9


class FrameType:
    """Plain numbers: looking a member of an enumeration up costs as much as a call, and every frame does that."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20

HEADER = Struct(">IBI")
"""Length and type in one number, flags, stream."""
NUMBER = Struct(">I")
SETTING = Struct(">HI")
_TWO_NUMBERS = Struct(">II")
_pack = HEADER.pack


def frame_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    return _pack(length << 8 | kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return _pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    return frame(FrameType.SETTINGS, 0, 0, b"".join([SETTING.pack(*item) for item in values.items()]))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, NUMBER.pack(increment))


def reset(stream_id: int, code: int) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, NUMBER.pack(code))


def go_away(last_stream_id: int, code: int, text: bytes = b"") -> bytes:
    return frame(FrameType.GOAWAY, 0, 0, _TWO_NUMBERS.pack(last_stream_id, code) + text)


SETTINGS_ACK = frame(FrameType.SETTINGS, ACK, 0)
