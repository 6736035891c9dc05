"""Files and batches of a server, in its folder or in memory."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.batches.batch_store import BatchStore
from penstock.gateway.batches.file_store import FileStore, FolderContents, MemoryContents
from penstock.gateway.batches.room import FileBounds, Room
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.upload import MAX_FILE_BYTES
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.database import Database, is_disk_error
from penstock.gateway.http.routes import Handle
from penstock.gateway.http.settings import AppSettings

logger = logging.getLogger("penstock")

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
