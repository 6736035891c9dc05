"""The log of a server process, on standard error or in a file."""

from __future__ import annotations

import logging
import os
import sys

from penstock.gateway.front.call import name_request
from penstock.gateway.front.loading_board import LoadingLog, LoadingView
from penstock.gateway.front.terminal_log import TerminalLog

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
