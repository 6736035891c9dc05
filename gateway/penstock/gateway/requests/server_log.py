"""The log of a server process, on standard error or in a file."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from typing import TextIO

from penstock.engines.contract.loading import Loading
from penstock.gateway.requests.call import name_request
from penstock.gateway.requests.loading_board import LoadingLog, LoadingView

logger = logging.getLogger("penstock")


def log_to_file(path: str) -> None:
    """From now on standard error is the end of this file, in processes that are started from here, too. Raises
    OSError."""
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)


def log_handler() -> tuple[logging.Handler, LoadingView]:
    """For lines on standard error, and where loading is shown."""
    if sys.stderr.isatty():
        terminal = TerminalLog(sys.stderr)
        return terminal, terminal
    return logging.StreamHandler(sys.stderr), LoadingLog(logger.info)


def set_up_log(level: str, handler: logging.Handler, who: str = "") -> None:
    """`who` stands in each line, where several processes write them."""
    handler.addFilter(name_request)
    logging.basicConfig(
        level=level, format=f"%(asctime)s %(levelname)-7s {who}%(message)s%(request)s", handlers=[handler]
    )
    for library in ("grpc", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)  # at level debug they drown out everything else


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
