"""pb_utils.Logger: a model's lines in the server's log."""

from __future__ import annotations

import enum

from . import host
from .arguments import of_type, text


class LogLevel(enum.IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        """Raises TypeError for a message that is no text, and for a level that is no LogLevel."""
        line, number = text(message, "message"), int(of_type(level, LogLevel, "level"))
        if host.current:
            host.current[0].tell("log", number, line)
        else:
            print(line, flush=True)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        Logger.log(message, LogLevel.VERBOSE)
