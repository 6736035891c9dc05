"""HTTP/2 by hand over a socket, for clients that misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

import hpack

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, Setting
from protocol.raw_http import connect
from support.http2 import begin, data, headers

Fields = Iterable[tuple[bytes, bytes]]


class Answer:
    """What has come on one stream."""

    def __init__(self) -> None:
        self.heads: list[dict[str, str]] = []
        self.body = b""
        self.ended = False
        self.reset: Http2ErrorCode | None = None

    @property
    def status(self) -> int:
        return int(self.heads[-1][":status"])

    @property
    def code(self) -> str:
        """Of the error in OpenAI's form."""
        return str(json.loads(self.body)["error"]["code"])


class Http2Client:
    """One connection. What the server says is read as far as a test asks for it."""

    def __init__(
        self, port: int, settings: dict[Setting, int] | None = None, sock: socket.socket | None = None
    ) -> None:
        self.socket = sock or connect(port)
        self.socket.sendall(begin(settings))
        self.answers: dict[int, Answer] = {}
        self.left: tuple[int, Http2ErrorCode, str] | None = None
        """The last GOAWAY: the last stream, the code, the text."""
        self.seen: list[int] = []
        """Types of frames, in order."""
        self._grown: dict[int, int] = {}
        self._buffer = b""
        self._decoder = hpack.Decoder()

    def __enter__(self) -> Http2Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *sent: bytes) -> None:
        self.socket.sendall(b"".join(sent))

    def ask(
        self, path: str, stream_id: int = 1, body: dict[str, Any] | bytes | None = None, *more: tuple[bytes, bytes]
    ) -> None:
        """A whole request."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        sent = headers(stream_id, request(path, *more, method=b"GET" if body is None else b"POST"), end=content is None)
        self.send(sent, b"" if content is None else data(stream_id, content, end=True))

    def answer(self, stream_id: int = 1) -> Answer:
        """When it has ended, or was reset."""
        self.read_until(lambda: self.on(stream_id).ended or self.on(stream_id).reset is not None)
        return self.on(stream_id)

    def on(self, stream_id: int) -> Answer:
        return self.answers.setdefault(stream_id, Answer())

    def grown(self, stream_id: int) -> int:
        """Bytes by which the stream's window has grown since this was last asked."""
        return self._grown.pop(stream_id, 0)

    def read_until(self, done: Any) -> None:
        while not done():
            assert self._read(), f"the connection ended; GOAWAY: {self.left}"

    def read_all(self) -> None:
        """To the end of the connection."""
        while self._read():
            pass

    def _read(self) -> bool:
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        self._buffer += received
        while len(self._buffer) >= frames.HEADER_BYTES:
            word, flags, stream_id = frames.HEADER.unpack_from(self._buffer)
            end = frames.HEADER_BYTES + (word >> 8)
            if len(self._buffer) < end:
                break
            payload, self._buffer = self._buffer[frames.HEADER_BYTES : end], self._buffer[end:]
            self._frame(word & 0xFF, flags, stream_id, payload)
        return bool(received)

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self.seen.append(kind)
        answer = self.on(stream_id)
        if kind == FrameType.HEADERS:
            answer.heads.append(dict(self._decoder.decode(payload)))
        elif kind == FrameType.DATA:
            answer.body += payload
        elif kind == FrameType.RST_STREAM:
            answer.reset = Http2ErrorCode(frames.NUMBER.unpack(payload)[0])
        elif kind == FrameType.GOAWAY:
            last, code = frames.NUMBER.unpack_from(payload)[0], frames.NUMBER.unpack_from(payload, 4)[0]
            self.left = last, Http2ErrorCode(code), payload[8:].decode()
        elif kind == FrameType.WINDOW_UPDATE:
            self._grown[stream_id] = self._grown.get(stream_id, 0) + frames.NUMBER.unpack(payload)[0]
        elif kind == FrameType.PING and not flags & frames.ACK:
            self.send(frames.frame(FrameType.PING, frames.ACK, 0, payload))
        if kind in (FrameType.HEADERS, FrameType.DATA) and flags & frames.END_STREAM:
            answer.ended = True


def request(path: str, *more: tuple[bytes, bytes], method: bytes = b"GET", authority: bytes = b"localhost") -> Fields:
    return [
        (b":method", method),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        *([(b":authority", authority)] if authority else []),
        *more,
    ]
