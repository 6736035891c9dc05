"""Answers that wait in memory for clients which do not read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("penstock.connections")

_LEFT = 7 / 8
_MUCH, _LITTLE = 16 << 20, 1 << 20


class Reader(Protocol):
    """A connection."""

    @property
    def seconds_to_read(self) -> float:
        """That its client would need for what has waited longest, as fast as it has read lately. About one second
        without news; what has just been queued does not count."""

    def abort(self) -> None: ...


class UnreadAnswers:
    """Bytes of all connections. Each connection may have much, since answers are large; together they may not. When
    they have too much, the connections are closed whose clients would take longest to read theirs: those that do not
    read, or just enough to look alive."""

    def __init__(self, limit: int, idle: Callable[[], None] | None = None) -> None:
        """`idle` is called when little is held any more and much was."""
        self.limit = limit
        self._idle = idle
        self._most = 0
        self.held = 0
        self.closed = 0
        """Connections, so far."""
        self._by_reader: dict[Reader, int] = {}

    def note(self, reader: Reader, size: int) -> None:
        """So much waits for it now. To be told 0 when it has ended."""
        before = self._by_reader.get(reader, 0)
        if size:
            self._by_reader[reader] = size
        elif before:
            del self._by_reader[reader]
        self.held += size - before
        if size > before:
            self._most = max(self._most, self.held)
            if self.held > self.limit:
                self._make_room()
        elif self._most > _MUCH and self.held < _LITTLE:
            self._most = 0
            if self._idle is not None:
                self._idle()

    def _make_room(self) -> None:
        slowest = sorted(self._by_reader, key=lambda reader: (reader.seconds_to_read, self._by_reader[reader]))
        closed, held = 0, self.held
        while slowest and self.held > self.limit * _LEFT:
            reader = slowest.pop()
            self.note(reader, 0)
            reader.abort()
            closed += 1
        self.closed += closed
        logger.warning("%d bytes of answers waited for their clients; closed %d connections", held, closed)
