"""The wire between gateway and engine process: msgspec-encoded messages over ZeroMQ PAIR sockets, never pickle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.engines.contract.messages import DownMessage, OwnerMessage, UpMessage

encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(DownMessage).decode
decode_owner: Callable[[bytes], OwnerMessage] = msgspec.msgpack.Decoder(OwnerMessage).decode
decode_up: Callable[[bytes], UpMessage] = msgspec.msgpack.Decoder(UpMessage).decode

Socket: TypeAlias = zmq.Socket[bytes]

context = zmq.Context()
"""For these sockets alone: an engine's own ones, vLLM's for example, must not hold up its `term`."""


def pair_socket() -> Socket:
    """A socket that queues without bound and never lingers: bounds are the scheduler's business, not the socket's."""
    socket: Socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def receive_all(socket: Socket) -> list[bytes]:
    """Every message that has arrived, oldest first; does not wait."""
    messages = []
    while True:
        try:
            messages.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return messages


def receive_monitor_events(socket: Socket) -> list[int]:
    """Kinds of events of a socket's monitor, as `receive_all`."""
    events = []
    while True:
        try:
            events.append(parse_monitor_message(socket.recv_multipart(zmq.NOBLOCK))["event"])
        except zmq.Again:
            return events


T = TypeVar("T")


class LoopSocket(Generic[T]):
    """ZeroMQ's file descriptor is edge-triggered: it must be drained at the beginning, whenever it was readable, and
    also after sending, since a send may swallow the edge (zmq_getsockopt(3), ZMQ_FD)."""

    def __init__(
        self, socket: Socket, receive_all: Callable[[Socket], list[T]], handler: Callable[[list[T]], None]
    ) -> None:
        """`handler` gets what `receive_all` returns, when that is something."""
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._receive_all = receive_all
        self.handler = handler
        self._loop.add_reader(socket.fileno(), self.drain)
        self._loop.call_soon(self.drain)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def drain(self) -> None:
        if self._socket.closed:
            return
        messages = self._receive_all(self._socket)
        if messages:
            self.handler(messages)

    def drain_soon(self) -> None:
        """Where `receive_all` may have left something, once other work has had its turn."""
        self._loop.call_soon(self.drain)

    def send(self, messages: Sequence[bytes]) -> None:
        """Raises zmq.Again when nobody is there to take them."""
        for message in messages:
            self._socket.send(message, zmq.NOBLOCK)
        if self._socket.poll(0, zmq.POLLIN):
            self.drain_soon()

    def close(self, linger_ms: int = 0) -> None:
        """Does not wait; what was sent may take `linger_ms` to leave."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=linger_ms)
