"""The worker's end of the socket."""

from __future__ import annotations

import io
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from .wire import FRAME, Packer, ReceiveArena, SendArena, decode, frame

Pack = Callable[[Packer], list[Any]]
"""Makes the fields of a message whose tensors go through the packer."""


class Message:
    __slots__ = ("fields", "kind", "tail")

    def __init__(self, kind: str, fields: list[Any], tail: memoryview) -> None:
        self.kind = kind
        self.fields = fields
        self.tail = tail


class Connection:
    """Sends from any thread. The main thread reads while it waits for work; a reader thread takes over for good when
    something has to be waited for while the model executes, so that plain models pay for no second thread."""

    def __init__(self, sock: socket.socket, inbox: ReceiveArena, outbox: SendArena) -> None:
        self._socket = sock
        self._file = io.BufferedReader(socket.SocketIO(sock, "r"), 256 * 1024)
        self.inbox = inbox
        self._outbox = outbox
        self._lock = threading.RLock()  # a finaliser may send while its own thread packs
        self._reading = threading.Lock()
        self._reader: threading.Thread | None = None
        self._work: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.handlers: dict[str, Callable[[Message], None]] = {}
        """Messages that are dealt with where they are read; all others are work for the main thread."""
        self.forked = False
        """This process is one that the model has forked."""
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """The socket and the arenas are the parent's: frames of two processes would mix, and what one reads the other
        waits for."""
        self.forked = True
        self._lock = threading.RLock()  # another thread of the parent may have held it

    def send(self, kind: str, *fields: Any) -> None:
        with self._lock:
            self._write(frame([kind, self.inbox.returned(), self._outbox.announcement(), *fields]))

    def send_packed(self, kind: str, pack: Pack, before: Callable[[], None] | None = None) -> None:
        """`before` is called between packing and sending: what it lets go of is given back with this message."""
        if self.forked:
            return
        with self._lock:
            packer = Packer(self._outbox)
            try:
                fields = pack(packer)
            except BaseException:
                self.take_back(packer)
                raise
            if before is not None:
                before()
            self._write(frame([kind, self.inbox.returned(), self._outbox.announcement(), *fields], packer))

    def take_back(self, packer: Packer, kept: int = 0) -> None:
        """Frees the blocks behind the first `kept`, which are not sent after all: no receiver would give them back."""
        self._outbox.release(packer.blocks[kept:])
        del packer.blocks[kept:]

    def _write(self, data: bytes) -> None:
        if self.forked:
            return
        try:
            self._socket.sendall(data)
        except OSError:
            os._exit(1)  # the server has gone, and with it everything that this process is for

    def next_work(self) -> Message:
        """The next message for the main thread. A process that the model has forked, and that comes back from the
        model's code, ends."""
        if self.forked:
            sys.exit()
        while self._reader is None:
            with self._reading:
                message = self._read()
            if not self._handled(message):
                return message
        return self._work.get()

    def read_in_thread(self) -> None:
        """From now on messages are handled as they come."""
        with self._lock:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_on, name="penstock-reader", daemon=True)
                self._reader.start()

    def _read_on(self) -> None:
        with self._reading:
            while True:
                message = self._read()
                if not self._handled(message):
                    self._work.put(message)

    def _handled(self, message: Message) -> bool:
        handler = self.handlers.get(message.kind)
        if handler is None:
            return False
        handler(message)
        return True

    def _read(self) -> Message:
        start = self._file.read(FRAME.size)
        if len(start) < FRAME.size:
            os._exit(0)
        head, tail = FRAME.unpack(start)
        # the tail has a buffer of its own: the arrays over it are aligned and may be written
        message = decode(self._file.read(head))
        data = memoryview(bytearray(tail))
        if tail and self._file.readinto(data) < tail:
            os._exit(0)
        kind, returned, grown, *fields = message
        if returned:
            with self._lock:
                self._outbox.release(returned)
        if grown:
            self.inbox.grown(grown)
        return Message(kind, fields, data)
