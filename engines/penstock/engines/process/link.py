"""A ZeroMQ socket on the event loop, which wakes once for everything that has arrived, and the heartbeats beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import zmq

from penstock.engines.contract.messages import DownMessage, Heartbeat, StepOutputs, UpMessage
from penstock.engines.errors import EngineError, NoResourcesError
from penstock.engines.process.heartbeat import HeartbeatPipe
from penstock.engines.process.wire import decode_up, encode, pair_socket, receive_all


class Link:
    """The gateway's end. ZeroMQ's file descriptor is edge-triggered: it must be drained whenever it was readable, and
    also after sending, since a send may swallow the edge (zmq_getsockopt(3), ZMQ_FD)."""

    def __init__(self, address: str, on_beat: Callable[[Heartbeat], None]) -> None:
        """Raises NoResourcesError when there can be no socket, EngineError when it cannot be at the address (paths have
        about 100 characters), and OSError when there can be no pipe."""
        self._loop = asyncio.get_running_loop()
        try:
            self._socket = pair_socket()
        except zmq.ZMQError as error:
            raise NoResourcesError(f"there can be no socket: {error}") from None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise EngineError(f"there can be no socket at {address} (TMPDIR decides where): {error}") from None
        try:
            self.heartbeats = HeartbeatPipe(on_beat)
        except OSError:
            self._socket.close()
            raise
        self._handler: Callable[[list[bytes]], None] = self._backlog_add
        self._backlog: list[bytes] = []
        self._arrived = asyncio.Event()
        self._loop.add_reader(self._socket.fileno(), self._drain)

    def _backlog_add(self, messages: list[bytes]) -> None:
        self._backlog.extend(messages)
        self._arrived.set()

    async def first_message(self) -> UpMessage:
        """Waits for the next message before `on_messages`; later ones are kept for it."""
        while not self._backlog:
            self._arrived.clear()
            self._drain()
            if not self._backlog:
                await self._arrived.wait()
        return decode_up(self._backlog.pop(0))

    def on_messages(self, handler: Callable[[list[bytes]], None]) -> None:
        """From now on `handler` gets the messages, all at once, as they arrive."""
        backlog, self._backlog = self._backlog, []
        self._handler = handler
        if backlog:
            handler(backlog)
        self._drain()

    def _drain(self) -> None:
        if self._socket.closed:
            return
        messages = receive_all(self._socket)
        if messages:
            self._handler(messages)

    @staticmethod
    def decode_steps(messages: Sequence[bytes]) -> Iterator[StepOutputs]:
        for data in messages:
            message = decode_up(data)
            if isinstance(message, StepOutputs):
                yield message

    def send(self, messages: Sequence[DownMessage]) -> None:
        for message in messages:
            self._socket.send(encode(message))
        if self._socket.poll(0, zmq.POLLIN):
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self.heartbeats.close()
