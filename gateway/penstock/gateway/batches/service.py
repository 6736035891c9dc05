"""Files and batches of a server that has a folder for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp

from penstock.gateway.batches.batch_store import BatchStore
from penstock.gateway.batches.database import Database
from penstock.gateway.batches.file_store import FileStore
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.http.settings import AppSettings

_MOST_OPEN = 1000
"""Batches that have not ended, of all tenants."""


class BatchService:
    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        lines_in_flight: int,
        endpoints: Mapping[str, ASGIApp],
        settings: AppSettings,
    ) -> None:
        """`most_bytes` of all files together. `endpoints` by their paths: batches may be for any of them. Raises
        ConfigError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._database = Database(folder / "penstock.sqlite")
            self.files = FileStore(folder / "files", self._database, most_bytes)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"data-dir: {folder}: {error}. Another server may be using it.") from None
        self.endpoints = tuple(endpoints)
        self.batches = BatchStore(self._database, _MOST_OPEN)
        self.runner = BatchRunner(self.batches, self.files, endpoints, settings, lines_in_flight)
        self.files.in_use = lambda: {batch.input_file_id for batch in self.runner.open()}

    async def start(self) -> None:
        """Once the models are loaded."""
        await self.runner.start()

    async def stop(self) -> None:
        """What is under way is asked again when the server is back."""
        await self.runner.stop()

    def close(self) -> None:
        """Once there are no requests any more."""
        self._database.close()

    def collect(self) -> Iterator[Metric]:
        text = "Batches that have not ended."
        yield GaugeMetricFamily("penstock_batches_open", text, value=len(self.runner.open()))
        lines = CounterMetricFamily("penstock_batch_lines", "Lines of batches that were answered.", labels=["result"])
        for result in ("completed", "failed"):
            lines.add_metric([result], self.runner.lines[result])
        yield lines
