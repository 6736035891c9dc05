"""`penstock run-batch`: a file of requests answered into another one, without ports."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec
from starlette.types import ASGIApp

from penstock.gateway.batches.answer_line import answer_line
from penstock.gateway.batches.lines import Line, check_lines, read_lines
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.front.context import ANYONE
from penstock.gateway.http.settings import AppSettings

logger = logging.getLogger("penstock")

_PROGRESS_S = 10.0


class _Result(msgspec.Struct):
    id: str
    """Requests have none."""
    custom_id: str


class BatchFile:
    """Results are written as they come. What an interrupted run has written is kept, and the rest is answered."""

    def __init__(self, source: Path, target: Path, lines_in_flight: int) -> None:
        self._source = source
        self._target = target
        self._seats = asyncio.Semaphore(lines_in_flight)
        self._lines: Counter[bool] = Counter()

    async def answer(self, endpoints: Mapping[str, ASGIApp], settings: AppSettings) -> None:
        """Raises ConfigError for what is wrong with the files."""
        try:
            total, errors = check_lines(self._source, endpoints, settings.max_body_bytes)
            if errors:
                first = errors[0]
                where = "" if first["line"] is None else f", line {first['line']}"
                raise ConfigError(f"{self._source}{where}: {first['message']}")
            done = _written(self._target)
            with self._target.open("ab") as out:
                progress = asyncio.create_task(self._tell_progress(total, len(done)))
                try:
                    async with asyncio.TaskGroup() as group:
                        for line in read_lines(self._source, endpoints):
                            if line.custom_id not in done:
                                await self._seats.acquire()
                                group.create_task(self._answer(line, endpoints, settings, out))
                finally:
                    progress.cancel()
        except OSError as error:
            raise ConfigError(str(error)) from None
        except ExceptionGroup as group:
            if (failed := group.subgroup(OSError)) is None:
                raise
            raise ConfigError(str(failed.exceptions[0])) from None
        logger.info("%s: %d answered, %d failed, %d before", self._target, *self._counts(), len(done))

    async def _answer(
        self, line: Line, endpoints: Mapping[str, ASGIApp], settings: AppSettings, out: IO[bytes]
    ) -> None:
        try:
            result, failed = await answer_line(line, endpoints, ANYONE, settings)
            out.write(result + b"\n")
            out.flush()
            self._lines[failed] += 1
        finally:
            self._seats.release()

    def _counts(self) -> tuple[int, int]:
        return self._lines[False], self._lines[True]

    async def _tell_progress(self, total: int, before: int) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            logger.info("%d of %d lines", sum(self._counts()) + before, total)


def _written(target: Path) -> set[str]:
    """The custom_ids that have results. A last line that was cut off is taken away."""
    if not target.exists():
        return set()
    found, size = set(), 0
    with target.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            try:
                found.add(msgspec.json.decode(text, type=_Result).custom_id)
            except msgspec.DecodeError:
                raise ConfigError(f"{target}: it is there, and has something else than results") from None
            size += len(text)
    with target.open("r+b") as file:
        file.truncate(size)
    return found
