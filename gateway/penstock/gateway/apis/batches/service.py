"""Files and batches of a server, in its folder or in memory, and the runner that answers their lines."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.apis.batches.batch_store import BatchStore, Status, StoredBatch
from penstock.gateway.apis.batches.file_store import (
    MAX_FILE_BYTES,
    MESSAGE_BATCH,
    FileBounds,
    FileStore,
    FolderContents,
    MemoryContents,
    Room,
)
from penstock.gateway.apis.batches.lines import BatchLine, LineAsker, LineSeat, check_lines, read_lines, unanswered
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.database import Database, is_disk_error
from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.routes import Handle
from penstock.gateway.transports.http.settings import AppSettings

logger = logging.getLogger("penstock")

_TOGETHER = 256
"""Results that are written at a time."""
_DISK_AGAIN_AFTER_S = 10.0
_NO_ROOM = "no_room"
_NO_ROOM_FOR_RESULTS = "There is no room in memory for the results of so many lines (--data-memory, --data-dir)."


def _ended(seat: LineSeat, places: asyncio.Semaphore, _: object) -> None:
    seat.leave()
    places.release()


class BatchRunner:
    """Batches take turns by the line. A line that has a result is never asked again, after a restart neither."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        endpoints: Mapping[str, Handle],
        settings: AppSettings,
        lines_in_flight: int,
    ) -> None:
        self._batches = batches
        self._files = files
        self._max_line = settings.max_body_bytes
        self._lines_in_flight = lines_in_flight
        self._asker = LineAsker(endpoints, settings, lines_in_flight)
        self._started = False
        self._open: dict[str, StoredBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}
        self.lines: Counter[str] = Counter()
        """That have a result: completed, failed."""

    async def start(self) -> None:
        """Goes on with what was open when the server ended, and begins what was created since."""
        waiting = await self._batches.open()
        self._started = True
        for batch in waiting:
            self.begin(batch)

    def begin(self, batch: StoredBatch) -> None:
        """A batch of the store. While models load, and once the server ends, it only waits there."""
        if self._started and batch.id not in self._open:
            self._open[batch.id] = batch
            self._tasks[batch.id] = asyncio.create_task(self._run(batch))

    async def stop(self) -> None:
        """Gives up what is being answered: it is asked again when the server is back."""
        self._started = False
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(self) -> Collection[StoredBatch]:
        """Those that have not ended, as far as they are now."""
        return self._open.values()

    def find(self, batch_id: str) -> StoredBatch | None:
        """None when it has ended."""
        return self._open.get(batch_id)

    async def cancel(self, batch: StoredBatch) -> None:
        """Ends an open batch soon; what is being answered is given up."""
        await self._enter(batch, "cancelling")
        if batch.id in self._answering:
            self._answering[batch.id].cancel()

    async def _run(self, batch: StoredBatch) -> None:
        try:
            while batch.is_open:
                await self._go_on(batch)
        except Exception:
            logger.exception("batch %s failed", batch.id)
            message = "The server could not go on with this batch."
            batch.errors = [{"code": "server_error", "line": None, "message": message, "param": None}]
            batch.enter("failed")
            await self._batches.save(batch)
        finally:
            del self._open[batch.id], self._tasks[batch.id]

    async def _go_on(self, batch: StoredBatch) -> None:
        """From its status on. Returns when it has ended, or after a wait when the disk has failed."""
        try:
            if batch.status == "validating" or (batch.status == "cancelling" and not batch.validated):
                await self._validate(batch)
            if batch.status == "in_progress":
                await self._answer_until_end(batch)
            if batch.is_open:
                await self._finish(batch)
        except Exception as error:
            if not is_disk_error(error):
                raise
            logger.exception("batch %s: trying again in %.0f s", batch.id, _DISK_AGAIN_AFTER_S)
            await asyncio.sleep(_DISK_AGAIN_AFTER_S)

    async def _enter(self, batch: StoredBatch, status: Status) -> None:
        """It has the status once the database knows."""
        before = batch.status
        batch.enter(status)
        try:
            await self._batches.save(batch)
        except Exception:
            if batch.status == status:  # and not cancelled meanwhile
                batch.status = before
            raise

    async def _validate(self, batch: StoredBatch) -> None:
        opened = partial(self._files.contents.open, batch.input_file_id)
        checked = await asyncio.to_thread(check_lines, opened, (batch.endpoint,), self._max_line)
        batch.total, batch.errors, batch.validated = checked.total, checked.errors, True
        if not batch.errors and not await self._batches.reserve(batch, checked.result_bytes):
            batch.errors = [{"code": _NO_ROOM, "line": None, "message": _NO_ROOM_FOR_RESULTS, "param": None}]
        if batch.errors:
            await self._enter(batch, "failed")
        elif batch.status == "validating":  # and not cancelled meanwhile
            await self._enter(batch, "in_progress")
        else:
            await self._batches.save(batch)

    async def _answer_until_end(self, batch: StoredBatch) -> None:
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

    async def _answer_all(self, batch: StoredBatch) -> None:
        """Lines may be large: each is read when there is a seat for it, and of those that wait without one a batch has
        no more than there are seats."""
        lines, places = await self._unanswered(batch), asyncio.Semaphore(self._lines_in_flight)
        deaths = await self._batches.deaths(batch.id)
        async with asyncio.TaskGroup() as group:
            while True:
                await places.acquire()
                seat = self._asker.seat()
                await seat.take()
                try:
                    line = await asyncio.to_thread(lambda: next(lines, None))
                except BaseException:
                    seat.leave()
                    raise
                if line is None:
                    seat.leave()
                    return
                task = group.create_task(self._answer(batch, line, seat, deaths.get(line.number, 0)))
                task.add_done_callback(partial(_ended, seat, places))  # also of one that never ran

    async def _unanswered(self, batch: StoredBatch) -> Iterator[BatchLine]:
        """For a thread: it reads the file."""
        done = await self._count(batch)
        opened = partial(self._files.contents.open, batch.input_file_id)
        lines = read_lines(opened, (batch.endpoint,))
        return (line for line in lines if line.number not in done)

    async def _count(self, batch: StoredBatch) -> Collection[int]:
        """The lines that have results; counts them for the batch."""
        done = await self._batches.answered(batch.id)
        batch.failed = sum(done.values())
        batch.completed = len(done) - batch.failed
        return done

    async def _answer(self, batch: StoredBatch, line: BatchLine, seat: LineSeat, num_deaths: int) -> None:
        principal = Principal(tenant=batch.tenant, key=batch.key, models=batch.models)
        died = partial(self._batches.count_death, batch.id, line.number)
        result, failed = await self._asker.answer(line, principal, seat, num_deaths, died)
        if not await self._batches.keep_results(batch, [(line, result)], failed=failed):
            result, failed = unanswered(line, _NO_ROOM, "There is no room in memory for this line's result."), True
            await self._batches.keep_results(batch, [(line, result)], failed=failed)
        batch.failed += failed
        batch.completed += not failed
        self.lines["failed" if failed else "completed"] += 1

    async def _finish(self, batch: StoredBatch) -> None:
        """Gives the lines that were not answered their errors, and writes the files. A restart may repeat it."""
        if batch.unanswered is None:
            batch.unanswered = batch.total - len(await self._count(batch))
            await self._batches.save(batch)
        if batch.status == "in_progress":
            batch.ends_as = "expired" if batch.unanswered else "completed"
        if batch.status == "in_progress":  # and not cancelled meanwhile
            await self._enter(batch, "finalizing")
        end: Status = "cancelled" if batch.status == "cancelling" else batch.ends_as
        await self._give_up_unanswered(batch, end)
        await self._count(batch)
        batch.output_file_id = await self._write_results(batch, "output", failed=False)
        batch.error_file_id = await self._write_results(batch, "error", failed=True)
        await self._enter(batch, end)
        if batch.is_of_messages:  # its client knows nothing of the file
            await self._files.forget([batch.input_file_id])
        logger.info("batch %s: %s, %d completed, %d failed", batch.id, end, batch.completed, batch.failed)

    async def _give_up_unanswered(self, batch: StoredBatch, end: Status) -> None:
        code, what = "batch_expired", "The batch's time was over"
        if end == "cancelled":
            code, what = "batch_cancelled", "The batch was cancelled"
        message = f"{what} before this line was answered."
        results = ((line, unanswered(line, code, message)) for line in await self._unanswered(batch))
        while some := await asyncio.to_thread(lambda: list(islice(results, _TOGETHER))):
            await self._batches.keep_results(batch, some, failed=True)

    async def _write_results(self, batch: StoredBatch, name: str, *, failed: bool) -> str | None:
        """The file's id; None when there are none. Written again, it has the same id."""
        file_id = f"file-{uuid.uuid5(uuid.UUID(batch.id.rpartition('_')[2]), name).hex}"
        after = 0
        with self._files.contents.draft() as out:
            while some := await self._batches.results(batch.id, after, _TOGETHER, failed=failed):
                after = some[-1][0]
                text = b"".join([result + b"\n" for _, result in some])
                await asyncio.to_thread(out.write, text)
            if not after:
                return None
            filename, lifetime = f"{batch.id}_{name}.jsonl", batch.output_lifetime
            purpose = MESSAGE_BATCH if batch.is_of_messages else "batch_output"
            await self._files.add(batch.tenant, filename, purpose, out, lifetime=lifetime, own_id=file_id)
        return file_id


_MOST_OPEN, _MOST_OPEN_OF_TENANT = 1000, 200
"""Batches that have not ended."""
_TIDY_EVERY_S = 600.0


class BatchService:
    def __init__(
        self,
        folder: Path | None,
        database: Database,
        bounds: FileBounds,
        lines_in_flight: int,
        endpoints: Mapping[str, Handle],
        settings: AppSettings,
    ) -> None:
        """`folder`: None where files are in memory, as the database is. `endpoints` by their paths: batches may be for
        any of them. Raises ConfigError."""
        self.volatile = folder is None
        try:
            contents = MemoryContents() if folder is None else FolderContents(folder / "files")
            room = Room(database, bounds, volatile=self.volatile)
            self.batches = BatchStore(database, room, _MOST_OPEN, _MOST_OPEN_OF_TENANT)
            self.files = FileStore(contents, database, room, self.batches.inputs_in_use)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"data-dir: {folder}: {error}") from None
        self.endpoints = tuple(endpoints)
        self.max_file = min(MAX_FILE_BYTES, bounds.bytes_of_tenant) if self.volatile else MAX_FILE_BYTES
        """Bytes that one may have."""
        self._loss_told = False
        self.runner = BatchRunner(self.batches, self.files, endpoints, settings, lines_in_flight)
        self._retention = bounds.retention
        self._tidying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Once the models are loaded."""
        await self.files.delete_strays()
        await self.runner.start()
        self._tidying = asyncio.create_task(self._tidy())

    async def stop(self) -> None:
        """What is under way is asked again when the server is back, unless it is in memory."""
        if self._tidying is not None:
            self._tidying.cancel()
        await self.runner.stop()
        if self.volatile:
            await self._cancel_open()

    async def _cancel_open(self) -> None:
        lost = await self.batches.open()
        for batch in lost:
            batch.enter("cancelled")
            await self.batches.save(batch)
        if lost:
            logger.warning("cancelled, since the server ends and they are in memory: %d batches", len(lost))

    def tell_of_loss(self) -> None:
        """At the first upload, where files are not kept."""
        if self.volatile and not self._loss_told:
            self._loss_told = True
            logger.warning("files and batches are in memory until the server ends; --data-dir keeps them")

    async def _tidy(self) -> None:
        while True:
            try:
                await self.files.delete_expired()
                if self._retention is not None:
                    await self.batches.delete_ended(time.time() - self._retention)
            except Exception as error:
                if not is_disk_error(error):
                    raise
                logger.exception("old files and batches could not be deleted")
            await asyncio.sleep(_TIDY_EVERY_S)

    def collect(self) -> Iterator[Metric]:
        text = "Batches that have not ended."
        yield GaugeMetricFamily("penstock_batches_open", text, value=len(self.runner.open()))
        lines = CounterMetricFamily("penstock_batch_lines", "Lines of batches that were answered.", labels=["result"])
        for result in ("completed", "failed"):
            lines.add_metric([result], self.runner.lines[result])
        yield lines
