"""The publisher of what enters and leaves the prefix cache, which also replays what a subscriber has missed.

A message has three parts: topic, sequence number (8 bytes, big-endian), batch. Subscribers that see a gap between two
numbers send the first one that they lack to the replay socket (from a DEALER, behind an empty part), and get all
batches from there on that are still kept, in messages of the same three parts behind an empty one; a message with an
empty batch ends them.

Nothing here holds up a step: messages are handed to a thread, which owns the sockets. Where it falls behind, or a
subscriber does, messages are dropped, which the sequence numbers show.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from typing import TypeAlias

import zmq

from penstock.engines.errors import EngineError
from penstock.engines.kv_events.messages import AllBlocksCleared, Event, encoded, events_of
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.kvcache import KVCacheManager

logger = logging.getLogger(__name__)

Socket: TypeAlias = zmq.Socket[bytes]

_UNSENT = 4096
"""Messages that may wait for the thread, or for one subscriber."""
_KEPT_BATCHES, _KEPT_BYTES = 10_000, 32 << 20
"""What can be replayed, at most."""
_LONGEST_REQUEST = 1024
"""Bytes of what subscribers may send: subscriptions, and sequence numbers."""
_RETRY_MS = 500
"""Between two tries to get an address that another process has: the one that this process replaces, for example."""
_LINGER_MS = 500
_END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Of one engine. Numbers begin at 0 with each process; its first batch says that nothing is cached."""

    def __init__(self, config: KVEventsConfig, kv: KVCacheManager) -> None:
        """Raises EngineError for an address that cannot be used."""
        self._groups = kv.groups
        self._rank = config.rank
        self._log = kv.keep_log()
        self._next_number = 0
        self._context = zmq.Context()
        self._outbox = _open(self._context, zmq.PUSH)
        self._outbox.bind("inproc://outbox")
        try:
            self._thread = _PublishingThread(config, self._context)
        except EngineError:
            self._context.destroy(linger=0)
            raise
        for endpoint in config.exposed:
            logger.warning(
                "%s: every client of this address can read the tokens of all prompts and answers, without a key",
                endpoint,
            )
        self._send([AllBlocksCleared()])
        self._thread.start()

    def publish(self) -> None:
        """What has changed since the last call."""
        entries = self._log.take()
        if entries:
            self._send(events_of(entries, self._groups))

    def _send(self, events: list[Event]) -> None:
        number = self._next_number.to_bytes(8, "big")
        self._next_number += 1
        try:
            self._outbox.send_multipart((number, encoded(events, time.time(), self._rank)), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("events are dropped: the thread that publishes them is behind")

    def close(self) -> None:
        """What has been published leaves within half a second, or never. Idempotent."""
        if not self._context.closed:
            self._outbox.close(linger=_LINGER_MS)
            self._thread.stop()
            self._context.destroy(linger=_LINGER_MS)


class _PublishingThread(threading.Thread):
    """Owns the sockets that others connect to."""

    def __init__(self, config: KVEventsConfig, context: zmq.Context[Socket]) -> None:
        """Binds. Raises EngineError."""
        super().__init__(name="kv-events", daemon=True)
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        """(sequence number, batch), the newest last."""
        self._kept_bytes = 0
        self._inbox = _open(context, zmq.PULL)
        self._inbox.connect("inproc://outbox")
        self._stop_receiver = _open(context, zmq.PAIR)
        self._stop_receiver.bind("inproc://stop")
        self._stop_sender = _open(context, zmq.PAIR)
        self._stop_sender.connect("inproc://stop")
        self._public = _open(context, zmq.PUB)
        self._replay = _open(context, zmq.ROUTER) if config.replay else None
        self._unbound: list[tuple[Socket, str]] = [(self._public, config.endpoint)]
        self._complaints: dict[str, int] = {}
        """By address, the newest fault that was told."""
        if self._replay is not None:
            self._replay.setsockopt(zmq.SNDHWM, _KEPT_BATCHES + 1)
            self._unbound.append((self._replay, config.replay))
        for endpoint, number in self._bind():
            if number != errno.EADDRINUSE:
                raise EngineError(f"--kv-events: {endpoint}: {zmq.strerror(number)}")
            logger.warning("%s is in use: events are published once it is free", endpoint)
            self._complaints[endpoint] = number

    def stop(self) -> None:
        self._stop_sender.send(b"")
        self.join(_LINGER_MS / 1e3)

    def run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("KV events are not published any more")

    def _serve(self) -> None:
        poller = zmq.Poller()
        sockets = [socket for socket in (self._inbox, self._stop_receiver, self._replay) if socket is not None]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_RETRY_MS if self._unbound else None))
            self._publish_all()
            if self._stop_receiver in ready:
                break
            if self._replay is not None and self._replay in ready:
                self._replay_to(self._replay.recv_multipart())
            if self._unbound:
                self._bind_again()
        for socket in (*sockets, self._public):
            socket.close(linger=_LINGER_MS)

    def _bind(self) -> list[tuple[str, int]]:
        """Binds those that are not bound yet. Returns the addresses that cannot be used, with ZeroMQ's numbers for the
        reasons."""
        errors = []
        for socket, endpoint in tuple(self._unbound):
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                errors.append((endpoint, error.errno or 0))
            else:
                self._unbound.remove((socket, endpoint))
        return errors

    def _bind_again(self) -> None:
        """An address that was in use may have got another fault meanwhile: it is tried for as long as this runs."""
        for endpoint, number in self._bind():
            if self._complaints.get(endpoint) != number:
                self._complaints[endpoint] = number
                logger.error("--kv-events: %s: %s; it will be retried", endpoint, zmq.strerror(number))

    def _publish_all(self) -> None:
        """What has come, before anybody is told that a replay is complete."""
        while True:
            try:
                number, batch = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._public.send_multipart((self._topic, number, batch))
            if self._replay is not None:
                self._keep(number, batch)

    def _keep(self, number: bytes, batch: bytes) -> None:
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay_to(self, request: list[bytes]) -> None:
        """Whatever is no request is ignored."""
        if self._replay is None or len(request) != 3 or len(request[2]) != 8:
            return
        client, empty, first = request
        for number, batch in self._kept:
            if number >= first:  # big-endian, so bytes compare as numbers
                self._replay.send_multipart((client, empty, self._topic, number, batch))
        self._replay.send_multipart((client, empty, b"", _END, b""))


def _open(context: zmq.Context[Socket], kind: int) -> Socket:
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, _UNSENT)
    socket.setsockopt(zmq.RCVHWM, _UNSENT)
    socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_REQUEST if kind in (zmq.PUB, zmq.ROUTER) else -1)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
