"""A client's connection to the door of an engine process, on the event loop. It is made once and ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import zmq

from penstock.engines.door.messages import ClientMessage, DoorMessage, Farewell, Hello, Welcome
from penstock.engines.door.sockets import client_socket
from penstock.engines.door.spec import DoorAddress
from penstock.engines.errors import EngineDeadError, EngineError, NoResourcesError, NotReadyError
from penstock.engines.process.wire import LoopSocket, context, encode, receive_all, receive_monitor_events

decode_door: Callable[[bytes], DoorMessage] = msgspec.msgpack.Decoder(DoorMessage).decode

_LINGER_MS = 1000
_BROKEN = "its process ended, or the connection to it broke"
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_CUT_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class HandshakeError(EngineDeadError):
    """The other side has closed the connection without a word: it cannot read what came, or it has just died."""


class DoorConnection:
    """`ended` is done with the reason as soon as the connection is gone."""

    def __init__(self, door: DoorAddress) -> None:
        """Begins to connect. Raises NoResourcesError, and EngineError for what is no address."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.read_bytes = 0
        """Of messages, so far."""
        self._door = door
        self._backlog: list[bytes] = []
        self._arrived = asyncio.Event()
        self._handler: Callable[[list[bytes]], None] = self._backlog.extend
        self._failures = 0
        """Events of handshakes that have failed."""
        try:
            socket = client_socket(context, door)
            try:
                monitor = socket.get_monitor_socket(_ENDS | _REFUSALS | _CUT_OFF)
            except zmq.ZMQError:
                socket.close()
                raise
        except zmq.ZMQError as error:
            raise NoResourcesError(f"no socket can be created: {error}") from None
        self._events = LoopSocket(monitor, receive_monitor_events, self._look)
        self._messages = LoopSocket(socket, receive_all, self._take)
        self._raw = socket
        try:
            socket.connect(door.address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(f"{door.address} is no address of an engine's door: {error}") from None

    async def welcome(self, hello: Hello) -> Welcome:
        """Introduces itself. Raises EngineDeadError while nobody is there, HandshakeError, and EngineError when the
        engine refuses."""
        self.send([encode(hello)])
        while not self._backlog:
            if self.ended.done():
                raise self._failure()
            await self._arrived.wait()
            self._arrived.clear()
        try:
            message = decode_door(self._backlog.pop(0))
        except msgspec.DecodeError:
            message = None
        if isinstance(message, Welcome):
            return message
        if isinstance(message, Farewell) and message.error.code == NotReadyError.code:
            raise EngineDeadError(message.error.message)
        if isinstance(message, Farewell):
            raise EngineError(f"the engine at {self._door.address} refuses: {message.error.message}")
        raise EngineError(f"what is at {self._door.address} is not an engine's door")

    def _failure(self) -> EngineError:
        """Why there is no answer."""
        if self._failures & _REFUSALS:
            return EngineError(f"the engine at {self._door.address} has another key, or none")
        if self._failures and self._door.key:
            return HandshakeError(f"the engine at {self._door.address} hangs up: it may have another key")
        return EngineDeadError(f"no engine is at {self._door.address}")

    def on_messages(self, handler: Callable[[list[bytes]], None]) -> None:
        """From now on `handler` gets the messages, all at once, as they arrive."""
        self._handler = handler
        backlog, self._backlog = self._backlog, []
        if backlog:
            handler(backlog)

    def _take(self, messages: list[bytes]) -> None:
        self.read_bytes += sum(map(len, messages))
        self._handler(messages)
        self._arrived.set()

    def _look(self, events: list[int]) -> None:
        """What had arrived before the end is delivered first."""
        for event in events:
            self._failures |= event & (_REFUSALS | _CUT_OFF)
        self._messages.drain()
        self.end(_BROKEN)

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self._arrived.set()

    def send(self, messages: Sequence[bytes]) -> None:
        try:
            self._messages.send(messages)
        except zmq.Again:
            self.end(_BROKEN)

    def close(self, *, last_words: ClientMessage | None = None) -> None:
        if not self._messages.closed:
            if last_words is not None:
                self.send([encode(last_words)])
            self._raw.disable_monitor()  # first: ZeroMQ's thread would wait for ever for a reader that has gone
            self._events.close()
            self._messages.close(_LINGER_MS)


class RemoteClock:
    """Estimates the difference by questions and answers (RFC 5905, 8): the answer with the shortest way there and back
    tells it best, and newer ones count more since clocks drift apart."""

    _AGEING = 1e-4
    """Seconds of uncertainty that each second adds: clocks differ by less than 100 ppm."""

    def __init__(self) -> None:
        self._difference = 0.0
        """Of this clock and the other one."""
        self._uncertainty = float("inf")
        self._heard_at = 0.0

    def heard(self, asked_at: float, theirs: float, now: float) -> None:
        """The other clock's time came back at `now` for a question of `asked_at`."""
        uncertainty = (now - asked_at) / 2
        if uncertainty <= self._uncertainty + (now - self._heard_at) * self._AGEING:
            difference = (asked_at + now) / 2 - theirs
            self._difference = 0.0 if abs(difference) <= uncertainty else difference  # one clock, most likely
            self._uncertainty, self._heard_at = uncertainty, now

    def local(self, theirs: float) -> float:
        return theirs + self._difference
