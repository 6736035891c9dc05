"""`penstock run-batch`: a file of requests answered into another one, without ports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from penstock.engines.errors import EngineDeadError
from penstock.gateway.apis.batches.lines import BatchLine, LineAsker, WrongLine, read_all, refused
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.requests.context import ANYONE
from penstock.gateway.transports.http.routes import Handle
from penstock.gateway.transports.http.settings import AppSettings

logger = logging.getLogger("penstock")

_PROGRESS_S = 10.0
_WATCH_S = 1.0


class _Error(msgspec.Struct):
    line: int | None = None


class _Result(msgspec.Struct):
    id: str
    """Requests have none."""
    custom_id: str | None
    error: _Error | None = None

    @property
    def key(self) -> str | int | None:
        """Of the line that it belongs to: the number of one that is wrong, which may share its custom_id."""
        return self.custom_id if self.error is None or self.error.line is None else self.error.line


class BatchFile:
    """Results are written as they come, of lines that are wrong, too. What an interrupted run has written is kept, and
    the rest is answered."""

    def __init__(self, source: Path, target: Path, lines_in_flight: int) -> None:
        self._source = source
        self._target = target
        self._lines_in_flight = lines_in_flight
        self._places = asyncio.Semaphore(lines_in_flight)
        self._lines: Counter[bool] = Counter()

    def check(self, endpoints: Mapping[str, Handle], settings: AppSettings) -> int:
        """How many lines there are. Before models load, which may take long. Raises ConfigError for what is wrong with
        the file."""
        total = 0
        try:
            for line in self._lines_of(endpoints, settings):
                if isinstance(line, WrongLine) and line.error.code == "too_many_tasks":
                    raise ConfigError(f"{self._source}, line {line.number}: {line.error}")
                total += 1
        except OSError as error:
            raise ConfigError(f"{self._source} cannot be read: {error.strerror}") from None
        return total

    def _lines_of(self, endpoints: Mapping[str, Handle], settings: AppSettings) -> Iterator[BatchLine | WrongLine]:
        return read_all(lambda: self._source.open("rb"), endpoints, settings.max_body_bytes)

    async def answer(self, endpoints: Mapping[str, Handle], settings: AppSettings, is_live: Callable[[], bool]) -> None:
        """`is_live` says whether the models can still answer. Raises ConfigError for what is wrong with the files,
        EngineDeadError."""
        total, asker = self.check(endpoints, settings), LineAsker(endpoints, settings, self._lines_in_flight)
        try:
            done = _written(self._target)
            with self._target.open("ab") as out:
                async with asyncio.TaskGroup() as watched:
                    watch = watched.create_task(self._watch(total, len(done), is_live))
                    async with asyncio.TaskGroup() as group:
                        for line in self._lines_of(endpoints, settings):
                            if isinstance(line, WrongLine):
                                if line.number not in done:
                                    self._write(out, refused(line), failed=True)
                            elif line.custom_id not in done:
                                await self._places.acquire()
                                group.create_task(self._answer(line, asker, out))
                    watch.cancel()
        except (OSError, ExceptionGroup) as error:
            cause = _first(error)
            if isinstance(cause, OSError):
                raise ConfigError(str(cause)) from None
            raise cause from None
        logger.info("%s: %d answered, %d failed, %d before", self._target, *self._counts(), len(done))

    async def _answer(self, line: BatchLine, asker: LineAsker, out: IO[bytes]) -> None:
        seat = asker.seat()
        try:
            result, failed = await asker.answer(line, ANYONE, seat)
            self._write(out, result, failed=failed)
        finally:
            seat.leave()
            self._places.release()

    def _write(self, out: IO[bytes], result: bytes, *, failed: bool) -> None:
        out.write(result + b"\n")
        out.flush()
        self._lines[failed] += 1

    def _counts(self) -> tuple[int, int]:
        return self._lines[False], self._lines[True]

    async def _watch(self, total: int, before: int, is_live: Callable[[], bool]) -> None:
        """Raises EngineDeadError: otherwise, lines would be asked again for ever."""
        said = time.monotonic()
        while is_live():
            await asyncio.sleep(_WATCH_S)
            if time.monotonic() - said >= _PROGRESS_S:
                said = time.monotonic()
                logger.info("%d of %d lines", sum(self._counts()) + before, total)
        raise EngineDeadError("The model is down. Run the same command again to answer the rest.")


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _written(target: Path) -> set[str | int | None]:
    """The keys of lines that have results. A last line that was cut off is taken away."""
    if not target.exists():
        return set()
    written: set[str | int | None] = set()
    size = 0
    with target.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            try:
                written.add(msgspec.json.decode(text, type=_Result).key)
            except msgspec.DecodeError:
                raise ConfigError(f"{target}: the file exists and holds something other than results") from None
            size += len(text)
    with target.open("r+b") as file:
        file.truncate(size)
    return written
