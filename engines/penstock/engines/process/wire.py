"""The wire between gateway and engine process: msgspec-encoded messages over ZeroMQ PAIR sockets, never pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq

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
