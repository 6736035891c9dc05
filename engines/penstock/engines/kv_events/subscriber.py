"""Subscribers to the KV events of servers, on the event loop. Each keeps the `CacheIndex` of one engine.

The server is not trusted: messages are bounded, and what cannot be read costs the server its index for a minute.
The index is forgotten where it may be wrong: after a lost connection, and after a gap between two numbers that the
replay socket does not fill.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import zmq

from penstock.engines.kv_events.index import BadEvents, CacheIndex, PromptHashes, read_batch
from penstock.engines.kv_events.settings import KVEventsSource
from penstock.engines.process.wire import LoopSocket, Socket, receive_monitor_events
from penstock.kvcache import BlockHasher

logger = logging.getLogger(__name__)

_context = zmq.Context()
"""For these sockets alone: ZeroMQ's thread looks up host names, and engines must not wait for that."""
_MOST_MESSAGE = 2 << 20
"""Bytes. A step of 131,072 prompt tokens takes less than one MiB."""
_UNREAD = 16
"""Messages that ZeroMQ keeps for a socket; the publisher keeps further ones."""
_AT_ONCE = 256 << 10
"""Bytes of messages after which other work of the event loop has its turn."""
_HELD = 32
"""Live messages that are kept while earlier ones are replayed."""
_REPLAY_SECONDS = 10.0
_REST_SECONDS = 60.0
_RECONNECT_MS, _MOST_RECONNECT_MS = 200, 10_000
_HEARTBEAT_MS = 15_000
_CHANGES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
_END = (-1).to_bytes(8, "big", signed=True)

Message = tuple[int, bytes]
"""Number and batch."""


class KVEventSubscriber:
    def __init__(self, source: KVEventsSource, index: CacheIndex, label: str) -> None:
        """`label`: the server's, for the log."""
        self.index = index
        self.live = False
        """The index has what the server has, as far as it can be known."""
        self.losses = 0
        """How often the index was forgotten, but for the server's own word."""
        self._source = source
        self._label = label
        self._raw: Socket | None = None
        self._monitor: LoopSocket[int] | None = None
        self._public: LoopSocket[Message | None] | None = None
        self._replay: LoopSocket[Message | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends a replay, or a pause."""
        self._is_reported = False
        """The log has it that there is no connection."""
        self._next: int | None = None
        """The number of the next message; None: whatever comes."""
        self._newest = 0.0
        """The server's time of the newest batch."""
        self._held: deque[Message] = deque(maxlen=_HELD)

    def start(self) -> None:
        """Begins to connect, and goes on until it is stopped."""
        try:
            self._raw = _socket(zmq.SUB)
            self._raw.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            monitor = self._raw.get_monitor_socket(_CHANGES)
            self._monitor = LoopSocket(monitor, receive_monitor_events, self._connection_changed)
            self._public = LoopSocket(self._raw, _receive, self._guarded(self._heard))
            self._raw.connect(self._source.endpoint)
        except zmq.ZMQError as error:
            self._rest(error)

    def stop(self) -> None:
        """Idempotent."""
        self._end_replay()
        if self._raw is not None:
            self._raw.disable_monitor()  # first: ZeroMQ's thread would wait for a reader that has gone
        for socket in (self._monitor, self._public):
            if socket is not None:
                socket.close()
        if self._raw is not None:
            self._raw.close()
        self._raw = self._monitor = self._public = None
        self._forget()
        self.live = False

    def _connection_changed(self, events: list[int]) -> None:
        for event in events:
            self._end_replay()
            self._forget()
            self.live = False
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_reported = False
                logger.info("follows the KV events of %s", self._label)
                self._catch_up(0)
                continue
            if not self._is_reported:
                logger.warning("the KV events of %s cannot be followed: there is no connection", self._label)
                self._is_reported = True
            # ZeroMQ connects again, but not to a server that has broken its rules
            self._timer = asyncio.get_running_loop().call_later(_REST_SECONDS, self._start_again)

    def _start_again(self) -> None:
        self.stop()
        self.start()

    # -- messages ----------------------------------------------------------------------------------------------

    def _guarded(self, handler: Callable[[list[Message]], None]) -> Callable[[list[Message | None]], None]:
        """For messages as they were received; None is one that no publisher sends."""

        def handle(messages: list[Message | None]) -> None:
            try:
                handler([_checked(message) for message in messages])
            except BadEvents as error:
                self._rest(error)

        return handle

    def _heard(self, messages: list[Message]) -> None:
        for number, batch in messages:
            self._take(number, batch)
        if self._public is not None:
            self._public.drain_soon()

    def _take(self, number: int, batch: bytes, *, may_ask: bool = True) -> None:
        """The next message, or one behind a gap. Raises BadEvents."""
        if self._replay is not None:
            self._held.append((number, batch))
            return
        if self._next is not None and number > self._next:
            if may_ask and self._source.replay_endpoint:
                self._held.append((number, batch))
                self._catch_up(self._next)
                return
            self._forget()
        seconds, events = read_batch(batch)
        if self._next is not None and number < self._next:
            if seconds <= self._newest:
                return  # it was replayed already
            self._forget()  # it is of another process
        self._next, self._newest = number + 1, seconds
        self.index.apply(events)

    # -- what was missed -----------------------------------------------------------------------------------------

    def _catch_up(self, number: int) -> None:
        """Asks for the messages from this one on."""
        if not self._source.replay_endpoint:
            self.live = True
            return
        self._next = number
        try:
            socket = _socket(zmq.DEALER)
            self._replay = LoopSocket(socket, _receive, self._guarded(self._replayed))
            socket.connect(self._source.replay_endpoint)
            socket.send_multipart((b"", number.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._rest(error)
            return
        self._timer = asyncio.get_running_loop().call_later(_REPLAY_SECONDS, self._give_up_replay)

    def _replayed(self, messages: list[Message]) -> None:
        """A gap at the beginning means that the server does not keep those messages any more."""
        for number, batch in messages:
            if number < 0:
                self._caught_up()
                return
            if number != self._next:
                self._forget()
            seconds, events = read_batch(batch)
            self._next, self._newest = number + 1, seconds
            self.index.apply(events)
        if self._replay is not None:
            self._replay.drain_soon()

    def _give_up_replay(self) -> None:
        logger.warning("%s does not replay its KV events: earlier ones are not known", self._label)
        self._forget()
        try:
            self._caught_up()
        except BadEvents as error:
            self._rest(error)

    def _caught_up(self) -> None:
        """Raises BadEvents."""
        held = list(self._held)
        self._end_replay()
        self.live = True
        for number, batch in held:
            self._take(number, batch, may_ask=False)

    def _end_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._replay is not None:
            self._replay.close()
        self._timer = self._replay = None
        self._held.clear()

    def _forget(self) -> None:
        self.losses += self._next is not None and len(self.index) > 0
        self._next = None
        self.index.clear()

    def _rest(self, error: Exception) -> None:
        logger.warning("the KV events of %s cannot be read; the next try is in a minute: %s", self._label, error)
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(_REST_SECONDS, self.start)


class FollowedServer:
    """A server with one or several engines."""

    def __init__(self, source: KVEventsSource, hasher: BlockHasher, model: str, label: str) -> None:
        """`hasher`, `model`: as `CacheIndex`."""
        self.ranks = [
            KVEventSubscriber(rank, CacheIndex(hasher, model), f"{label} ({rank.endpoint})")
            for rank in source.of_ranks()
        ]

    @property
    def live(self) -> bool:
        return all(rank.live for rank in self.ranks)

    @property
    def losses(self) -> int:
        return sum(rank.losses for rank in self.ranks)

    @property
    def num_blocks(self) -> int:
        return sum(len(rank.index) for rank in self.ranks)

    def matched(self, prompt: PromptHashes) -> int:
        """Leading tokens that one of its engines has cached."""
        return max(rank.index.matched(prompt) for rank in self.ranks)

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()


def _socket(kind: int) -> Socket:
    socket: Socket = _context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, _UNREAD)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    return socket


def _receive(socket: Socket) -> list[Message | None]:
    """As many as may be read at once. Parts before the number are a topic, and an empty one in replays."""
    messages: list[Message | None] = []
    size = 0
    while size < _AT_ONCE:
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        size += 1024 + sum(map(len, parts))
        is_message = 2 <= len(parts) <= 4 and len(parts[-2]) == len(_END)
        messages.append((int.from_bytes(parts[-2], "big", signed=True), parts[-1]) if is_message else None)
    return messages


def _checked(message: Message | None) -> Message:
    if message is None:
        raise BadEvents("a message without a number and a batch")
    return message
