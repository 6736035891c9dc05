"""Builders of what a server keeps and tells of its requests, from its configuration: access log, spans, load reports,
usage, responses, batches."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.gateway.apis.batches.file_store import FileBounds
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.apis.usage.ledger import UsageLedger
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.database import Database, NewerSchemaError
from penstock.gateway.metrics.request_metrics import EndedRequests, RequestMetrics
from penstock.gateway.metrics.server_load import EngineLoad, ServerLoad
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.access_log import AccessLog
from penstock.gateway.requests.call import Hook, RequestJournal, be_strict
from penstock.gateway.requests.load_report import LoadReporter, ReportForm
from penstock.gateway.transports.http.routes import Handle
from penstock.gateway.transports.http.settings import AppSettings

if TYPE_CHECKING:  # needs the extra [otel]
    from penstock.gateway.metrics.spans import RequestSpans

_MOST_FILES_OF_TENANT = 10_000
"""As many as one page of GET /v1/files shows."""


class RequestRecords:
    """What is told about the requests of a process: access log, spans, metrics, and the load that answers carry."""

    def __init__(self, config: Config, dataplane: DataPlane, on_end: Hook) -> None:
        """`on_end` is told of requests that have ended, too. Raises ConfigError."""
        self._access_log = build_access_log(config)
        self._spans = build_spans(config)
        self.metrics = RequestMetrics()
        ended = EndedRequests()
        self.load_reports = build_load_reports(config, dataplane, ended)
        strict = config.server.strict_requests
        self.journal = build_journal(self._access_log, self._spans, self.metrics, ended, on_end, strict=strict)
        self.metrics.in_flight = self.journal.in_flight

    def close(self) -> None:
        """Writes what is not written yet."""
        if self._access_log is not None:
            self._access_log.flush()
        if self._spans is not None:
            self._spans.close()


def build_load_reports(config: Config, dataplane: DataPlane, ended: EndedRequests) -> LoadReporter:
    """What balancers are told with answers: of all language models, and of the requests that have `ended`."""

    def engines() -> list[EngineLoad]:
        return [
            EngineLoad(model.engine.stats, model.engine.info.block_size, model.max_num_seqs)
            for _, model in dataplane.models.loaded()
        ]

    form = config.server.load_reports
    return LoadReporter(ServerLoad(engines, ended), None if form == "request" else ReportForm(form))


def build_access_log(config: Config) -> AccessLog | None:
    settings = config.access_log
    if settings.access_log == "off":
        return None
    return AccessLog(
        sys.stderr, settings.access_log, sample=settings.access_log_sample, slow_s=settings.access_log_slow_s
    )


def build_spans(config: Config) -> RequestSpans | None:
    """Raises ConfigError."""
    settings = config.opentelemetry
    if settings.otlp_endpoint is None:
        return None
    try:
        from penstock.gateway.metrics.spans import open_spans
    except ImportError:
        raise ConfigError(
            "otlp-endpoint: needs packages that are not installed: pip install 'penstock-server[otel]'"
        ) from None
    try:
        return open_spans(settings.otlp_endpoint, settings.otlp_sample, config.server.id)
    except ValueError as error:
        raise ConfigError(f"otlp-endpoint: {error}") from None


def build_journal(
    access_log: AccessLog | None, spans: RequestSpans | None, *on_end: Hook, strict: bool = False
) -> RequestJournal:
    """`on_end`: who else is told of requests that have ended; they are told first."""
    hooks, begin = list(on_end), [be_strict] if strict else []
    if access_log is not None:
        hooks.append(access_log)
    if spans is None:
        return RequestJournal(hooks, begin)
    return RequestJournal([*hooks, spans.end], [*begin, spans.begin], [spans.leave])


def open_database(config: Config) -> Database:
    """In the server's folder; in memory where it has none. Raises ConfigError."""
    if config.data.data_dir is None:
        return Database(None)
    folder = Path(config.data.data_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Database(folder / "penstock.sqlite")
    except OSError as error:
        raise ConfigError(f"data-dir: {folder}: {error.strerror}") from None
    except NewerSchemaError as error:
        raise ConfigError(f"data-dir: {folder}/penstock.sqlite: {error}. Use that server, or another folder.") from None
    except sqlite3.Error as error:
        raise ConfigError(f"data-dir: {folder}: {error}. Another server may be using it.") from None


def build_ledger(config: Config, database: Database) -> UsageLedger:
    """Raises ConfigError."""
    try:
        return UsageLedger(database)
    except sqlite3.Error as error:
        raise ConfigError(f"data-dir: {config.data.data_dir}: {error}") from None


def build_responses(config: Config, database: Database, settings: AppSettings) -> ResponseService:
    """Raises ConfigError."""
    try:
        return ResponseService(database, settings, retention=config.data.data_retention or None)
    except sqlite3.Error as error:
        raise ConfigError(f"data-dir: {config.data.data_dir}: {error}") from None


def build_batches(
    config: Config, database: Database, endpoints: Mapping[str, Handle], settings: AppSettings
) -> BatchService | None:
    """None where the server has neither a folder nor memory for them. Raises ConfigError."""
    data = config.data
    folder = None if data.data_dir is None else Path(data.data_dir)
    size = data.data_memory if folder is None else data.data_size
    if not size:
        return None
    bounds = FileBounds(
        bytes=size,
        bytes_of_tenant=min(data.data_size_per_tenant or size, size),
        files_of_tenant=_MOST_FILES_OF_TENANT,
        retention=data.data_retention or None,
    )
    return BatchService(folder, database, bounds, data.batch_lines_in_flight, endpoints, settings)
