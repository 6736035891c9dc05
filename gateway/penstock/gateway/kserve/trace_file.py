"""Where traces are written: Triton's JSON trace format, one array of events to a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)

_FLUSH_BYTES = 1 << 16
_MOST_BYTES = 64 << 20
"""Collected for a file of its own; then that file has fewer traces than were asked for."""


class TraceFile:
    """Collects finished traces. With a `log_frequency` of n, every n of them make a file of their own, `<path>.0`,
    `<path>.1` and so on; without, all go into `<path>`, which is written to now and then and is valid JSON each time.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._index = 0
        self._traces = 0
        self._events: list[bytes] = []
        self._size = 0
        self._written = 0

    def add(self, events: Sequence[bytes], log_frequency: int) -> None:
        """One finished trace: its events as JSON objects."""
        if not self.path:
            return
        self._events += events
        self._traces += 1
        self._size += sum(map(len, events))
        if log_frequency:
            if self._traces >= log_frequency or self._size >= _MOST_BYTES:
                self._write(f"{self.path}.{self._index}", b"[" + b",".join(self._events) + b"]", append=False)
                self._index += 1
        elif self._size >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected, into `<path>`."""
        if not self._events:
            return
        data = (b",\n" if self._written else b"[") + b",\n".join(self._events) + b"]\n"
        self._write(self.path, data, append=bool(self._written))
        self._written += 1

    def _write(self, path: str, data: bytes, *, append: bool) -> None:
        self._events, self._traces, self._size = [], 0, 0
        try:
            with open(path, "r+b" if append else "wb") as file:
                if append:
                    file.seek(-len(b"]\n"), os.SEEK_END)
                file.write(data)
        except OSError as error:
            logger.warning("traces were lost: cannot write %s: %s", path, error.strerror)
