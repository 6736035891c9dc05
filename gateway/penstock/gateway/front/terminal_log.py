"""The log on a terminal: lines as everywhere, and below them a bar while something is loaded."""

from __future__ import annotations

import logging
import shutil
import threading
from typing import TextIO

from penstock.engines.contract.loading import Loading

_CLEAR_LINE = "\r\x1b[K"
_WIDTH = 24


class TerminalLog(logging.StreamHandler[TextIO]):
    """A handler for log lines, and a LoadingView. Any thread may log: whatever writes holds the handler's lock."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lock = self.lock or threading.RLock()
        self._bar = ""

    def emit(self, record: logging.LogRecord) -> None:
        if self._bar:
            self.stream.write(_CLEAR_LINE)
        super().emit(record)
        self._draw()

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        share = loading.share
        filled = 0 if share is None else int(share * _WIDTH)
        bar = "" if share is None else f"[{'#' * filled}{'.' * (_WIDTH - filled)}] "
        with self._lock:
            # one column stays free: a cursor behind the last one would begin a new line
            self._bar = f"{bar}{name}: {loading} ({seconds:.0f} s)"[: shutil.get_terminal_size().columns - 1]
            self._draw()

    def clear(self) -> None:
        with self._lock:
            if self._bar:
                self._bar = ""
                self.stream.write(_CLEAR_LINE)
                self.stream.flush()

    def _draw(self) -> None:
        if self._bar:
            # back to the start of the line: what the access log and other processes write replaces the bar (`line_end`)
            self.stream.write(f"{_CLEAR_LINE}{self._bar}\r")
            self.stream.flush()
