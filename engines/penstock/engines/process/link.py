"""The gateway's connection to an engine process that it has started: a socket for messages, a pipe for heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO

import zmq

from penstock.engines.contract.messages import Heartbeat, OwnerMessage, StepOutputs, UpMessage
from penstock.engines.errors import EngineError, NoResourcesError
from penstock.engines.process.heartbeat import HeartbeatPipe
from penstock.engines.process.wire import LoopSocket, decode_up, encode, pair_socket, receive_all


class EngineLink:
    def __init__(self, address: str, heartbeats: FileIO, on_beat: Callable[[Heartbeat], None]) -> None:
        """`heartbeats`: the pipe on which they come. Raises NoResourcesError if no socket can be created, EngineError
        if it cannot be bound to the address (a path has at most about 100 characters)."""
        try:
            socket = pair_socket()
        except zmq.ZMQError as error:
            raise NoResourcesError(f"no socket can be created: {error}") from None
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise EngineError(f"no socket can be created at {address} (TMPDIR decides where): {error}") from None
        self.heartbeats = HeartbeatPipe(heartbeats, on_beat)
        self._backlog: list[bytes] = []
        self._arrived = asyncio.Event()
        self._socket = LoopSocket(socket, receive_all, self._backlog_add)

    def _backlog_add(self, messages: list[bytes]) -> None:
        self._backlog.extend(messages)
        self._arrived.set()

    async def first_message(self) -> UpMessage:
        """Waits for the next message before `on_messages`; later ones are kept for it."""
        while not self._backlog:
            self._arrived.clear()
            self._socket.drain()
            if not self._backlog:
                await self._arrived.wait()
        return decode_up(self._backlog.pop(0))

    def on_messages(self, handler: Callable[[list[bytes]], None]) -> None:
        """From now on `handler` gets the messages as they arrive, all that have arrived together in one call."""
        backlog, self._backlog = self._backlog, []
        self._socket.handler = handler
        if backlog:
            handler(backlog)
        self._socket.drain()

    @staticmethod
    def decode_steps(messages: Sequence[bytes]) -> Iterator[StepOutputs]:
        for data in messages:
            message = decode_up(data)
            if isinstance(message, StepOutputs):
                yield message

    def send(self, messages: Sequence[OwnerMessage]) -> None:
        with suppress(zmq.Again):  # the process is gone; the watchdog is about to notice, and nothing may block here
            self._socket.send([encode(message) for message in messages])

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self.heartbeats.close()
