"""What a model prints, line by line in the server's log."""

from __future__ import annotations

import asyncio
import logging
import os
from contextvars import Context

_MAX_LINE = 8192
"""Characters; a longer line is cut into several."""


def lines_of(data: bytes) -> list[str]:
    """A line as it may stand in the log: not too long, and without control characters, which could pass for lines of
    the server's own."""
    text = data.decode("utf-8", "replace").rstrip()
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char == "\t" else "�" for char in text)
    return [text[start : start + _MAX_LINE] for start in range(0, len(text), _MAX_LINE)]


class OutputLog(asyncio.Protocol):
    """Reads the pipe that is a process's stdout and stderr."""

    def __init__(self, name: str, reader: int, writer: int) -> None:
        self._logger = logging.getLogger(name)
        self._nobody = Context()
        """For lines that belong to no request: the pipe is read in the context of the one that has loaded the model."""
        self._reader = reader
        self.writer = writer
        self._rest = b""

    @classmethod
    def open(cls, name: str) -> OutputLog:
        reader, writer = os.pipe()
        return cls(name, reader, writer)

    async def start(self) -> None:
        """Begins to read; the process has its own copy of the writing end."""
        os.close(self.writer)
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(self._reader, "rb", 0))

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.writer)

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > _MAX_LINE:
            lines.append(rest)
            rest = b""
        self._rest = rest
        for line in lines:
            self._log(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._log(self._rest)
            self._rest = b""

    def _log(self, line: bytes) -> None:
        for text in lines_of(line):
            self._nobody.run(self._logger.info, "%s", text)
