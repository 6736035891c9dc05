"""What an engine process says while it loads: each new stage at once, its progress a few times a second."""

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
        self._stage = ""
        self._next = 0.0

    def __call__(self, loading: Loading) -> None:
        now = self._clock()
        if loading.stage != self._stage or now >= self._next:
            self._stage = loading.stage
            self._next = now + _INTERVAL
            self._send(loading)
