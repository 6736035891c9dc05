"""Cancels the requests that a model makes when no client waits for what they are made for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from penstock.classic.base import InferCall

_INTERVAL = 0.02
"""Seconds between looks. There are none while no model asks another one."""


class Followers:
    def __init__(self) -> None:
        self._following: dict[asyncio.Task[None], Collection[InferCall]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, task: asyncio.Task[None], calls: Collection[InferCall]) -> None:
        """The task is cancelled when all of these have been."""
        self._following[task] = calls
        task.add_done_callback(self._following.pop)
        if self._timer is None:
            self._wait()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for task, calls in list(self._following.items()):
            if all(call.cancelled for call in calls):
                loop.call_soon(task.cancel)  # it must have begun, or nothing would tell the model of its end
        if self._following:
            self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
