"""Tells a model's process which of its requests nobody waits for any more, once it has asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.classic.base import InferCall
from penstock.classic.python.link import Link

_INTERVAL = 0.02
"""Seconds between looks at the open requests. There are none for models that never ask."""


class Cancellations:
    def __init__(self, link: Link, calls: Mapping[int, InferCall]) -> None:
        self._link = link
        self._calls = calls
        self._told: set[int] = set()
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """The process wants to know, from now on."""
        self._asked = True
        self._look()

    def watch(self) -> None:
        """There are new requests."""
        if self._asked and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._look)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told.intersection_update(self._calls)
        new = [number for number, call in self._calls.items() if call.cancelled and number not in self._told]
        if new:
            self._told.update(new)
            self._link.send("cancelled", [new])
        if self._calls:
            self.watch()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
