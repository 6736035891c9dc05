"""Answers the lines of open batches, so many at a time, and ends each batch once."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from itertools import islice

from starlette.types import ASGIApp

from penstock.gateway.batches.answer_line import answer_line
from penstock.gateway.batches.batch import Batch, Status
from penstock.gateway.batches.batch_store import BatchStore
from penstock.gateway.batches.file_store import FileStore, StoredFile
from penstock.gateway.batches.lines import Line, check_lines, read_lines, unanswered
from penstock.gateway.front.context import Principal
from penstock.gateway.http.settings import AppSettings

logger = logging.getLogger("penstock")

_TOGETHER = 256
"""Lines that are read, or results that are written, at a time."""


class BatchRunner:
    """Batches take turns by the line. A line that has a result is never asked again, after a restart neither."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        endpoints: Mapping[str, ASGIApp],
        settings: AppSettings,
        lines_in_flight: int,
    ) -> None:
        self._batches = batches
        self._files = files
        self._endpoints = endpoints
        self._settings = settings
        self._seats = asyncio.Semaphore(lines_in_flight)
        self._open: dict[str, Batch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}
        self.lines: Counter[str] = Counter()
        """That have a result: completed, failed."""

    async def start(self) -> None:
        """Goes on with what was open when the server ended."""
        for batch in await self._batches.open():
            self.begin(batch)

    def begin(self, batch: Batch) -> None:
        self._open[batch.id] = batch
        self._tasks[batch.id] = asyncio.create_task(self._run(batch))

    async def stop(self) -> None:
        """Gives up what is being answered: it is asked again when the server is back."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(self) -> Collection[Batch]:
        """Those that have not ended, as far as they are now."""
        return self._open.values()

    def find(self, batch_id: str) -> Batch | None:
        """None when it has ended."""
        return self._open.get(batch_id)

    async def cancel(self, batch: Batch) -> None:
        """Ends an open batch soon; what is being answered is given up."""
        batch.enter("cancelling")
        await self._batches.save(batch)
        if batch.id in self._answering:
            self._answering[batch.id].cancel()

    async def _run(self, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                await self._validate(batch)
            if batch.status == "in_progress":
                await self._answer_until_end(batch)
            if batch.is_open:
                await self._finish(batch)
        except Exception as error:
            logger.exception("batch %s failed", batch.id)
            batch.errors = [{"code": "server_error", "line": None, "message": type(error).__name__, "param": None}]
            batch.enter("failed")
            await self._batches.save(batch)
        finally:
            del self._open[batch.id], self._tasks[batch.id]

    async def _validate(self, batch: Batch) -> None:
        path, max_line = self._files.path(batch.input_file_id), self._settings.max_body_bytes
        batch.total, batch.errors = await asyncio.to_thread(check_lines, path, (batch.endpoint,), max_line)
        if batch.status == "validating":  # and not cancelled meanwhile
            batch.enter("failed" if batch.errors else "in_progress")
        await self._batches.save(batch)

    async def _answer_until_end(self, batch: Batch) -> None:
        """Returns when all lines are answered, its time is over, or it is being cancelled."""
        answering = self._answering[batch.id] = asyncio.create_task(self._answer_all(batch))
        try:
            await asyncio.wait({answering}, timeout=max(0.0, batch.expires - time.time()))
        finally:
            del self._answering[batch.id]
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer_all(self, batch: Batch) -> None:
        async with asyncio.TaskGroup() as group:
            async for line in self._unanswered(batch):
                await self._seats.acquire()
                group.create_task(self._answer(batch, line))

    async def _unanswered(self, batch: Batch) -> AsyncIterator[Line]:
        done = await self._count(batch)
        lines = read_lines(self._files.path(batch.input_file_id), (batch.endpoint,))
        while some := await asyncio.to_thread(lambda: list(islice(lines, _TOGETHER))):
            for line in some:
                if line.number not in done:
                    yield line

    async def _count(self, batch: Batch) -> Collection[int]:
        """The lines that have results; counts them for the batch."""
        done = await self._batches.answered(batch.id)
        batch.failed = sum(done.values())
        batch.completed = len(done) - batch.failed
        return done

    async def _answer(self, batch: Batch, line: Line) -> None:
        """Takes a seat that was acquired, and releases it."""
        principal = Principal(tenant=batch.tenant, models=batch.models)
        try:
            result, failed = await answer_line(line, self._endpoints, principal, self._settings)
            await self._batches.keep_results(batch.id, [(line.number, result)], failed=failed)
            batch.failed += failed
            batch.completed += not failed
            self.lines["failed" if failed else "completed"] += 1
        finally:
            self._seats.release()

    async def _finish(self, batch: Batch) -> None:
        """Gives the lines that were not answered their errors, and writes the files."""
        end: Status = "completed"
        code, what = "batch_expired", "The batch's time was over"
        if batch.status == "cancelling":
            end, code, what = "cancelled", "batch_cancelled", "The batch was cancelled"
        else:
            batch.enter("finalizing")
            await self._batches.save(batch)
        left = [line async for line in self._unanswered(batch)]
        if left and end == "completed":
            end = "expired"
        for begin in range(0, len(left), _TOGETHER):
            some = [
                (line.number, unanswered(line, code, f"{what} before this line was answered."))
                for line in left[begin : begin + _TOGETHER]
            ]
            await self._batches.keep_results(batch.id, some, failed=True)
        await self._count(batch)
        for failed, name in ((False, "output"), (True, "error")):
            file = await self._write_results(batch, name, failed=failed)
            setattr(batch, f"{name}_file_id", None if file is None else file.id)
        batch.enter(end)
        await self._batches.save(batch)
        logger.info("batch %s: %s, %d completed, %d failed", batch.id, end, batch.completed, batch.failed)

    async def _write_results(self, batch: Batch, name: str, *, failed: bool) -> StoredFile | None:
        """None when there are none."""
        after = 0
        with tempfile.TemporaryFile() as out:
            while some := await self._batches.results(batch.id, after, _TOGETHER, failed=failed):
                after = some[-1][0]
                text = b"".join([result + b"\n" for _, result in some])
                await asyncio.to_thread(out.write, text)
            if not after:
                return None
            return await self._files.add(
                batch.tenant, f"{batch.id}_{name}.jsonl", "batch_output", out, lifetime=batch.output_lifetime, own=True
            )
