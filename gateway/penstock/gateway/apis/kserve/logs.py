"""Triton's log settings over Python's logging."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.requests.changes import Changes

LogValue = bool | int | str

LOGGER = "penstock"
"""Above all of our loggers."""

_ISO8601 = "%Y-%m-%dT%H:%M:%SZ"
_UINT32 = 1 << 32
_T = TypeVar("_T", bool, int, str)


class LogSettings:
    """What the logging extension reads and changes, for every logger below `penstock`.

    Made after logging has been configured: it works on these handlers, by default those of the root logger. The
    settings that stand at that time, and `switches` above them, are the ones that null brings back.
    """

    def __init__(
        self,
        log_file: str = "",
        handlers: Iterable[logging.Handler] | None = None,
        switches: Mapping[str, LogValue] | None = None,
    ) -> None:
        self._logger = logging.getLogger(LOGGER)
        handlers = logging.getLogger().handlers if handlers is None else handlers
        self._handlers = [(handler, _Filter(), _time_format(handler)) for handler in handlers]
        for handler, levels, _ in self._handlers:
            handler.addFilter(levels)
        level = self._logger.getEffectiveLevel()
        self._initial: dict[str, LogValue] = {
            "log_file": log_file,
            "log_info": level <= logging.INFO,
            "log_warning": level <= logging.WARNING,
            "log_error": level <= logging.ERROR,
            "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": "default",
            **(switches or {}),
        }
        self._current = dict(self._initial)
        self.changes = Changes()
        """Told when settings have changed."""
        if switches:
            self._apply()

    def settings(self) -> dict[str, LogValue]:
        """By Triton's names and in its order."""
        return dict(self._current)

    def update(self, values: Mapping[str, object]) -> None:
        """Changes all of `values`, or nothing. Null brings back what the server started with.

        Raises InvalidRequestError for an unknown setting (which Triton ignores) and for a value of the wrong type, and
        UnsupportedError for `log_file`.
        """
        checked = {name: self._initial.get(name, "") if value is None else value for name, value in values.items()}
        changed = {name: _checked(name, checked[name]) for name in checked}
        self._current.update(changed)
        self._apply()
        self.changes.tell()

    def _apply(self) -> None:
        current = self._current
        enabled = {
            logging.DEBUG: bool(current["log_verbose_level"]),
            logging.INFO: bool(current["log_info"]),
            logging.WARNING: bool(current["log_warning"]),
            logging.ERROR: bool(current["log_error"]),
        }
        self._logger.setLevel(min((level for level, on in enabled.items() if on), default=logging.CRITICAL + 1))
        for handler, levels, default in self._handlers:
            levels.enabled = enabled
            formatter = handler.formatter
            if formatter is not None and default is not None:
                iso = current["log_format"] == "ISO8601"
                formatter.datefmt, formatter.converter = (_ISO8601, time.gmtime) if iso else default


class _Filter(logging.Filter):
    """Lets each level through on its own, which a logger's threshold cannot. Other people's loggers pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled: Mapping[int, bool] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != LOGGER and not record.name.startswith(LOGGER + "."):
            return True
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.ERROR)
        return self.enabled.get(level, True)


def _time_format(handler: logging.Handler) -> tuple[str | None, Callable[[float | None], time.struct_time]] | None:
    formatter = handler.formatter
    return None if formatter is None else (formatter.datefmt, formatter.converter)


def _checked(name: str, value: object) -> LogValue:
    if name == "log_file":
        raise UnsupportedError("log file location can not be updated through network protocol")
    if name in ("log_info", "log_warning", "log_error"):
        return _typed(name, value, bool, "a boolean")
    if name == "log_verbose_level":
        level = _typed(name, value, int, "an unsigned integer")
        if not 0 <= level < _UINT32:
            raise InvalidRequestError(f"{name} must be an unsigned integer of 32 bits")
        return level
    if name == "log_format":
        if value not in ("default", "ISO8601"):
            raise InvalidRequestError(f"invalid argument for log_format, got: {str(value)[:64]}")
        return str(value)
    raise InvalidRequestError(f"unknown log setting '{name[:64]}'")


def _typed(name: str, value: object, kind: type[_T], words: str) -> _T:
    if type(value) is not kind:
        raise InvalidRequestError(f"{name} must be {words}")
    return value
