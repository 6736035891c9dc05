"""Frames of HTTP/2 (RFC 9113, 4 and 6): their bytes, the faults that clients make in them, and their reader."""

from __future__ import annotations

from collections.abc import Iterator
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


class Http2ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The client broke a rule that ends the connection."""

    def __init__(self, code: Http2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        """Sent to the client with GOAWAY."""


class StreamFault(Exception):
    """The client broke a rule that ends one stream."""

    def __init__(self, code: Http2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def protocol_error(text: str) -> ConnectionFault:
    return ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, text)


def wrong_length(kind: str) -> ConnectionFault:
    return ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"{kind} has a wrong length")


Frame = tuple[int, int, int, bytes]
"""Type, flags, stream, payload. That of HEADERS is the whole block, without padding and priority."""

_MAX_CONTINUATIONS = 16
_PIECE_BYTES = MAX_FRAME_BYTES
"""Of a DATA frame that is longer, so much is handed on as soon as it has come: what is held of a frame does not grow
with the frames that a client may send."""
_LAST_BYTES = 512
"""At least so much is left for the last piece: it has all of the padding, and is no tiny frame."""
_PRIORITY_BYTES = 5
_STREAM_MASK = 2**31 - 1


class FrameReader:
    """Holds one unfinished frame and one unfinished header block. A long DATA frame comes out as several."""

    def __init__(self, max_block_bytes: int) -> None:
        self._max_block_bytes = max_block_bytes
        self._buffer = b""
        self.left = 0
        """Bytes of a long DATA frame that have not been handed on."""
        self._long = (0, 0)
        """Its flags and its stream."""
        self._padding = b""
        """The byte that says how much padding it has, if it has some."""
        self._preface = True
        """It has not come yet."""
        self.begun = False
        """The client's first settings have come."""
        self.finished = 0
        """Frames so far; a header block counts as one."""
        self._block: list[bytes] | None = None
        self._block_of = (0, 0)
        """The flags of the block's first frame, and its stream."""
        self._block_bytes = 0

    @property
    def in_frame(self) -> bool:
        """A frame or a header block has begun and not ended."""
        return bool(self._buffer) or self.left > 0 or self._block is not None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with these bytes: to be read to the end before the next call.
        Raises ConnectionFault."""
        buffer = self._buffer + data if self._buffer else data
        position = self._skip_preface(buffer) if self._preface else 0
        end = len(buffer)
        while not self._preface:
            if self.left:
                size = self._piece(end - position)
                if not size:
                    break
                frame = self._long_frame(buffer[position : position + size])
                position += size
            else:
                start = position + HEADER_BYTES
                if start > end:
                    break
                word, flags, stream_id = HEADER.unpack_from(buffer, position)
                kind, size = word & 0xFF, word >> 8
                if size > _PIECE_BYTES:
                    self._check_long(kind, size)
                    if kind == FrameType.DATA:
                        padded = 1 if flags & PADDED else 0
                        if start + padded > end:
                            break
                        self._padding = buffer[start : start + padded]
                        self._long, self.left = (flags, stream_id & _STREAM_MASK), size - padded
                        position = start + padded
                        continue
                if end - start < size:
                    break
                position = start + size
                frame = self._frame(kind, flags, stream_id & _STREAM_MASK, buffer[start:position])
            if frame is not None:
                self.finished += 1
                yield frame
        self._buffer = buffer[position:]

    def _check_long(self, kind: int, size: int) -> None:
        """What may be long are bodies, and header blocks as long as they may be in several"""
        if size > OWN_MAX_FRAME_BYTES:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "a frame is too long")
        if kind != FrameType.DATA and size > self._max_block_bytes:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "a frame is too long")

    def _piece(self, come: int) -> int:
        """How many of the bytes that have come of a long frame are handed on; 0: more have to come first."""
        if come >= self.left:
            return self.left
        size = min(come, self.left - _LAST_BYTES)
        return size if size >= _PIECE_BYTES else 0

    def _long_frame(self, data: bytes) -> Frame | None:
        self.left -= len(data)
        flags, stream_id = self._long
        if self.left:
            return self._frame(FrameType.DATA, flags & ~(END_STREAM | PADDED), stream_id, data)
        return self._frame(FrameType.DATA, flags, stream_id, self._padding + data if self._padding else data)

    def _skip_preface(self, buffer: bytes) -> int:
        size = min(len(buffer), len(PREFACE))
        if buffer[:size] != PREFACE[:size]:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 only")
        if size < len(PREFACE):
            return 0
        self._preface = False
        return size

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> Frame | None:
        """None: a header block goes on."""
        if not self.begun:
            if kind != FrameType.SETTINGS or flags & ACK:
                raise protocol_error("the first frame is not SETTINGS")
            self.begun = True
        if self._block is not None or kind == FrameType.CONTINUATION:
            return self._continue(kind, flags, stream_id, payload)
        if kind == FrameType.HEADERS:
            return self._start_block(flags, stream_id, payload)
        return kind, flags, stream_id, payload

    def _start_block(self, flags: int, stream_id: int, payload: bytes) -> Frame | None:
        fragment = without_padding(flags, payload)
        if flags & PRIORITY:  # means nothing any more (RFC 9113, 5.3.2)
            if len(fragment) < _PRIORITY_BYTES:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for a priority")
            fragment = fragment[_PRIORITY_BYTES:]
        if flags & END_HEADERS:
            return FrameType.HEADERS, flags, stream_id, fragment
        self._block, self._block_of, self._block_bytes = [fragment], (flags, stream_id), len(fragment)
        return None

    def _continue(self, kind: int, flags: int, stream_id: int, payload: bytes) -> Frame | None:
        block = self._block
        if block is None:
            raise protocol_error("CONTINUATION continues nothing")
        if kind != FrameType.CONTINUATION or stream_id != self._block_of[1]:
            raise protocol_error("a header block is interrupted")
        block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > self._max_block_bytes or len(block) > _MAX_CONTINUATIONS:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & END_HEADERS:
            return None
        self._block = None
        return FrameType.HEADERS, *self._block_of, b"".join(block)


def without_padding(flags: int, payload: bytes) -> bytes:
    """Raises ConnectionFault."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise protocol_error("a frame has more padding than bytes")
    return payload[1 : len(payload) - payload[0]]
