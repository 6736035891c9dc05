"""What an engine process says while it loads: a stage's start and end at once, its progress a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engines.contract.loading import Loading, Report

_INTERVAL = 0.2


class LoadingReports:
    """Is a Report."""

    def __init__(self, send: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self.stage = ""
        """The newest."""
        self._next = 0.0

    def __call__(self, loading: Loading) -> None:
        now = self._clock()
        complete = loading.total > 0 and loading.done >= loading.total
        if loading.stage != self.stage or complete or now >= self._next:
            self.stage = loading.stage
            self._next = now + _INTERVAL
            self._send(loading)
