"""A connection of a port, whatever is spoken on it: reading, writing, and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import cast

from penstock.gateway.front.port_connections import PortConnection
from penstock.gateway.http2_sockets.pace import ReaderPace
from penstock.gateway.http2_sockets.port import SocketPort

logger = logging.getLogger("penstock.connections")


class SocketConnection(asyncio.Protocol, ABC):
    """In its port's connections from its beginning to its end. Looked at once a second (`tick`)."""

    def __init__(self, port: SocketPort) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections = port.connections
        self._unread_answers = port.unread
        self._reading = True
        self._written = 0
        """Bytes, so far."""
        self._unread = 0
        """Bytes that are noted to wait for the client."""
        self._ending = False
        """Everything is written. What still comes is dropped."""
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._timers: list[asyncio.TimerHandle] = []
        self.reader = ReaderPace(self._loop.time())

    # What a protocol has

    @property
    @abstractmethod
    def replaceable(self) -> bool:
        """Nothing runs on it: it may be closed for another one."""

    @property
    @abstractmethod
    def idle_since(self) -> float: ...

    @abstractmethod
    def shutdown(self) -> None:
        """No further requests are taken; those that run may end."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """Once a second: what takes too long."""

    # The socket

    def join(self, transport: asyncio.BaseTransport, write_buffer: int) -> bool:
        """Whether its port has room for it."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=write_buffer)
        return self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._unread_answers.note(self, 0)
        self._connections.remove(self)

    def _read(self, *, wanted: bool) -> None:
        if wanted != self._reading and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def abort(self) -> None:
        self._transport.abort()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, what))

    def _note_unread(self, held: int = 0) -> None:
        unread = held + self._transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread = unread
            self._unread_answers.note(self, unread)

    @property
    def seconds_to_read(self) -> float:
        return self.reader.seconds_to_read


def watch(connections: Iterable[PortConnection], now: float) -> None:
    """Once a second. An error ends one connection: the others must be watched on."""
    for connection in connections:
        if isinstance(connection, SocketConnection):
            try:
                connection.tick(now)
            except Exception as error:
                logger.error("a connection is closed", exc_info=error)
                connection.abort()
