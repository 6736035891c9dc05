"""Cuts off clients that do not read their answers."""

from __future__ import annotations

import asyncio


class UnsentWatch:
    """Of one connection. While it is on, the client has to take some of what waits for it in each period."""

    __slots__ = ("_loop", "_period", "_timer", "_transport", "_unsent")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, period: float) -> None:
        """`period` in seconds."""
        self._transport = transport
        self._loop = loop
        self._period = period
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        """Bytes that waited when the period began."""

    def start(self) -> None:
        """Nothing happens if it is on already."""
        if self._timer is None:
            self._unsent = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._period, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Cuts off a client that has taken nothing for the whole of the last period, and one that took all before it
        and has not agreed to the end of a TLS connection."""
        self._timer = None
        unsent = self._transport.get_write_buffer_size()
        closing = self._transport.is_closing()
        if unsent >= self._unsent and (unsent or closing):
            self._transport.abort()
        elif unsent or closing:
            self.start()
