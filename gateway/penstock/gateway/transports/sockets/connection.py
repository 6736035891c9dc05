"""A connection of a port, whatever is spoken on it: reading, writing, and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from penstock.gateway.requests.connections import PortConnection, PortConnections
from penstock.gateway.requests.intake import BodyBudget, UnreadAnswers
from penstock.gateway.transports.http2.bounds import Http2Limits

logger = logging.getLogger("penstock.connections")

_SLOWEST = 1024
"""Bytes per second. Below this, readers are all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketSettings:
    """Seconds. Those that gRPC knows mean what they mean in its library."""

    keepalive_time: float = 7200.0
    """Of silence, after which the client is asked whether it is there."""
    keepalive_timeout: float = 20.0
    keepalive_without_calls: bool = False
    """Also while none of the client's requests runs."""
    max_pings_without_data: int = 2
    """Pings in a row, while nothing else is sent; 0: any number."""
    max_age: float | None = None
    """Then the client is asked to open another connection. A tenth is added or taken away at random, so that clients
    that came together do not all return together."""
    max_age_grace: float | None = None
    """That requests get then; None: as long as they take."""
    start_seconds: float = 10.0
    """From connecting to the client's first settings."""
    frame_seconds: float = 10.0
    """Without any byte of a frame or header block that has begun."""
    whole_frame_seconds: float = 60.0
    """From its first byte to its last."""
    send_seconds: float = 60.0
    """Without any byte taken by a client while output waits for it."""
    stream_seconds: float = 600.0
    """Without any byte of one stream taken, while others may be."""


@dataclass(slots=True, kw_only=True)
class SocketPort:
    settings: SocketSettings
    limits: Http2Limits
    connections: PortConnections
    bodies: BodyBudget
    unread: UnreadAnswers


class BodyPace:
    """A body or message that has begun to come. Looked at about once a second; times are those of the loop."""

    __slots__ = ("_grace", "_idle", "_looked", "_max_idle", "_rate", "_seconds", "_seen", "_waited")

    def __init__(self, grace: float, rate: float, seconds: float, now: float, max_idle: float = float("inf")) -> None:
        """After `grace` seconds each further second must have brought `rate` bytes on average. All of it may take
        `seconds`, and `max_idle` may pass without any byte."""
        self._grace = grace
        self._max_idle = max_idle
        self._rate = rate
        self._seconds = seconds
        self._looked = now
        self._waited = self._idle = 0.0
        """Seconds in which it was waited for, and since then any of it came."""
        self._seen = 0
        """Bytes that had come when it was last looked at."""

    def late(self, now: float, received: int, *, waited: bool) -> bool:
        """`received` bytes have come so far. Where nobody `waited` for them since the last look, that time is not the
        client's."""
        seconds, self._looked = now - self._looked, now
        if not waited:
            return False
        self._waited += seconds
        self._idle = self._idle + seconds if received == self._seen else 0.0
        self._seen = received
        too_slow = self._waited - self._grace > received / self._rate
        return self._idle > self._max_idle or too_slow or self._waited > self._seconds


class ReaderPace:
    """A client that has to take what is written for it. Looked at about once a second."""

    __slots__ = ("_taken", "_taken_at", "_waiting", "seconds_to_read")

    def __init__(self, now: float) -> None:
        self._taken = 0
        """Bytes that the client had taken when that was last looked at."""
        self._taken_at = now
        self._waiting = 0
        """Bytes that waited for the client then."""
        self.seconds_to_read = 0.0
        """That the client needs for those of them that still wait, as fast as it has taken some since."""

    def idle_seconds(self, now: float, taken: int, unwritten: int, held: int = 0) -> float:
        """Since the client took any. It has taken so many bytes so far, `unwritten` wait for it in the socket, and
        `held` behind those."""
        moved = taken - self._taken
        self.seconds_to_read = max(0, self._waiting - moved) / (max(0, moved) + _SLOWEST)
        self._waiting = held + unwritten
        if not unwritten or moved:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at


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

    def _read(self, *, on: bool) -> None:
        if on != self._reading and not self._transport.is_closing():
            self._reading = on
            if on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def abort(self) -> None:
        self._transport.abort()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, what))

    def _untaken(self) -> int:
        """Bytes that wait for the client: in the transport, and while there are any, in the kernel, which takes so many
        at a time that a slow client would seem to take none for long. A TLS transport that is closing shows none of
        those that it still has for the kernel."""
        unwritten = self._transport.get_write_buffer_size()
        if unwritten or self._transport.is_closing():
            unwritten += untaken_bytes(self._transport)
        return unwritten

    def _note_unread(self, held: int = 0) -> None:
        unread = held + self._transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread = unread
            self._unread_answers.note(self, unread)

    @property
    def seconds_to_read(self) -> float:
        return self.reader.seconds_to_read


def untaken_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that the client's machine has not acknowledged, and 1 for the end of the connection; 0 where the system
    does not tell."""
    own = transport.get_extra_info("socket")
    if sys.platform != "linux" or own is None:
        return 0
    import fcntl  # not everywhere
    import termios

    number = bytes(4)
    with suppress(OSError, ValueError):  # it is closed already
        number = fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, number)
    return int.from_bytes(number, sys.byteorder)


def watch(connections: Iterable[PortConnection], now: float) -> None:
    """Once a second. An error ends one connection: the others must be watched on."""
    for connection in connections:
        if isinstance(connection, SocketConnection):
            try:
                connection.tick(now)
            except Exception as error:
                logger.error("a connection is closed", exc_info=error)
                connection.abort()
