"""The two ends of a door's connections: ZeroMQ sockets, encrypted where there is a key."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from penstock.engines.door.keys import client_pair, engine_pair
from penstock.engines.door.spec import DoorAddress, DoorSpec

_UNREAD_MESSAGES = 10_000
"""To one client; it is disconnected before that by the number of bytes, unless they are tiny."""
_UNSEEN_MESSAGES = 100
"""From one client, of up to `max_message_bytes` each, while the interpreter is busy elsewhere; then it has to wait."""
_ZAP = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"penstock"
_HANDSHAKE_MS = 5000


class Guard:
    """Answers ZeroMQ's questions who may connect (https://rfc.zeromq.org/spec/27/): who has the shared key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: str) -> None:
        self._client = z85.decode(client_pair(key).public)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def answer(self) -> None:
        """Takes one question; call while `socket` is readable."""
        version, request_id, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        knows = domain == _ZAP_DOMAIN and mechanism == b"CURVE" and credentials == [self._client]
        verdict = (b"200", b"OK") if knows else (b"400", b"the keys differ")
        self.socket.send_multipart([version, request_id, *verdict, b"", b""])


def door_socket(context: zmq.Context[zmq.Socket[bytes]], spec: DoorSpec) -> zmq.Socket[bytes]:
    """A ROUTER that says when a message cannot be sent, instead of dropping it. Raises ZMQError when it cannot be at
    its address. With a key, a `Guard` must be there first."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, _UNREAD_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _UNSEEN_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, spec.max_message_bytes)
    _common(socket)
    if spec.key:
        pair = engine_pair(spec.key)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(spec.address)
    except BaseException:
        socket.close()
        raise
    return socket


def client_socket(context: zmq.Context[zmq.Socket[bytes]], door: DoorAddress) -> zmq.Socket[bytes]:
    """A DEALER for one connection, not connected yet: it never connects again by itself, since what was under way would
    be lost without a word."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    _common(socket)
    if door.key:
        pair = client_pair(door.key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, engine_pair(door.key).public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    return socket


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
