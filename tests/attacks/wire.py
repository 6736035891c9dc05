"""An attacker's connections: raw frames on a socket, and nothing that keeps the rules."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.frames import FrameType, frame
from penstock.gateway.transports.http2.hpack import encode_fields
from support.http2 import begin

SERVICE = b"/inference.GRPCInferenceService/"
WHOLE = frames.END_HEADERS


def call_block(method: bytes, extra: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    start = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", SERVICE + method), (b":authority", b"x"))
    return encode_fields([*start, (b"content-type", b"application/grpc"), (b"te", b"trailers"), *extra])


def opened(stream_id: int, block: bytes) -> bytes:
    return frame(FrameType.HEADERS, WHOLE, stream_id, block)


def message(data: bytes, *, compressed: bool = False) -> bytes:
    return bytes((compressed,)) + len(data).to_bytes(4) + data


def sent(stream_id: int, payload: bytes, *, end: bool = True) -> bytes:
    return frame(FrameType.DATA, frames.END_STREAM if end else 0, stream_id, payload)


def infer_message(model: str) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="IN", datatype="INT32", shape=[1, 1] if model == "slow" else [1])
    request.raw_input_contents.append(np.ones(1, np.int32).tobytes())
    return message(bytes(request.SerializeToString()))


class Attacker:
    """One connection."""

    def __init__(self, port: int, *, reads: bool = True, window: int | None = None) -> None:
        self._port = port
        self._reads = reads
        self._window = window
        self.next_id = 1
        self.alive = False

    async def connect(self, *, silent: bool = False) -> Attacker:
        sock = socket.socket()
        if not self._reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
        self.alive = True
        if self._reads:
            self._reading = asyncio.create_task(self._discard())
        else:
            self._writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._writer.transport.set_write_buffer_limits(high=1 << 18)
        if not silent:
            window = {} if self._window is None else {frames.Setting.INITIAL_WINDOW_SIZE: self._window}
            await self.write(begin(window) + frames.SETTINGS_ACK)
        return self

    async def _discard(self) -> None:
        try:
            while await self._reader.read(1 << 16):
                pass
        except OSError:
            pass
        self.alive = False

    async def write(self, data: bytes) -> bool:
        """False: the server has ended the connection."""
        if self.alive and not self._writer.is_closing():
            try:
                self._writer.write(data)
                async with asyncio.timeout(5):
                    await self._writer.drain()
            except TimeoutError:
                return True
            except OSError:
                self.alive = False
        else:
            self.alive = False
        return self.alive

    def stream(self) -> int:
        """The number of another one."""
        self.next_id += 2
        return self.next_id - 2

    def close(self) -> None:
        self._writer.transport.abort()


async def many(port: int, count: int, *, reads: bool = True, window: int | None = None) -> list[Attacker]:
    return [await Attacker(port, reads=reads, window=window).connect() for _ in range(count)]


def until(seconds: float) -> Iterable[int]:
    """Numbers, as long as there is time."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield number
        number += 1
