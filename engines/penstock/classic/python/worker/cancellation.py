"""What the worker knows of requests that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Iterable

from . import host
from .connection import Connection, Message


class Cancellation:
    """The server is asked once; from then on it tells what is cancelled as it happens."""

    def __init__(self, connection: Connection) -> None:
        self._cancelled: set[int] = set()
        self._asked = False
        connection.handlers["cancelled"] = self._told

    def _told(self, message: Message) -> None:
        self._cancelled.update(message.fields[0])

    def cancelled(self, call: int) -> bool:
        if not self._asked:
            host.connected().ask("watch", lambda _: []).result()  # the cancelled ones are told before the reply
            self._asked = True
        return call in self._cancelled

    def forget(self, calls: Iterable[int], *, kept: bool) -> None:
        """`kept`: the calls of a decoupled model live on after their batch."""
        if self._cancelled and not kept:
            self._cancelled.difference_update(calls)
