"""A ZeroMQ socket on the event loop, which wakes once for everything that has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import zmq

from penstock.engines.process.wire import Socket

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

    def send(self, messages: Sequence[bytes]) -> None:
        """Raises zmq.Again when nobody is there to take them."""
        for message in messages:
            self._socket.send(message, zmq.NOBLOCK)
        if self._socket.poll(0, zmq.POLLIN):
            self._loop.call_soon(self.drain)

    def close(self, linger_ms: int = 0) -> None:
        """Does not wait; what was sent may take `linger_ms` to leave."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=linger_ms)
