"""The composition root: how configuration, models, data plane and fronts fit together."""

from __future__ import annotations

import asyncio
import hashlib
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from starlette.types import ASGIApp

from penstock.classic.base import InferModel
from penstock.classic.registry import backend_names
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.engines.host.gpus import visible_gpus
from penstock.gateway.batches.file_store import FileBounds
from penstock.gateway.batches.service import BatchService
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections import RepositoryConfig
from penstock.gateway.database import Database
from penstock.gateway.front.access import Restrictions, read_restrictions
from penstock.gateway.front.access_log import AccessLog
from penstock.gateway.front.auth import ApiKeys, key_digest, key_id
from penstock.gateway.front.context import ALL_ROLES, USER_ROLES, Principal, Role
from penstock.gateway.front.descriptors import connections_within_limit
from penstock.gateway.front.exposure import asks_for_keys, browser_rules
from penstock.gateway.front.intake import Intake
from penstock.gateway.front.journal import Hook, RequestJournal
from penstock.gateway.front.key_file import read_keys
from penstock.gateway.front.load_report import LoadReporter, ReportForm
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.front.server_health import ServerHealth
from penstock.gateway.front.tls import TlsSettings
from penstock.gateway.front.work_pool import WorkPools
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.http.text_models import TextModels
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.settings import GrpcSettings
from penstock.gateway.kserve.headers import forward_pattern
from penstock.gateway.kserve.logs import LogSettings
from penstock.gateway.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.kserve.store import ModelStore
from penstock.gateway.kserve.trace_settings import TraceSettings, changes
from penstock.gateway.kserve.tracing import Tracing
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.hub import fetch_draft_model, fetch_model
from penstock.gateway.llm.kserve.folder_layout import check_installed
from penstock.gateway.llm.kserve.loader import LANGUAGE_BACKENDS, language_loaders
from penstock.gateway.llm.model_builder import build_model
from penstock.gateway.llm.models import LoadedModel, find_model, is_hub_id
from penstock.gateway.memory.budget import MemoryBudget
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.metrics.gpu import GpuMetrics
from penstock.gateway.metrics.registry import Metrics
from penstock.gateway.metrics.server_load import EndedRequests, EngineLoad, ServerLoad
from penstock.gateway.on_demand.on_demand import OnDemand
from penstock.gateway.on_demand.settings import OnDemandSettings
from penstock.gateway.pooling.kserve_model import unloaded_config
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.repository.cache_config import build_cache
from penstock.gateway.repository.checking import RepositoryCheck, Verdict
from penstock.gateway.repository.classic_loader import ClassicLoaders
from penstock.gateway.repository.manager import ModelRepository
from penstock.gateway.repository.planning import Loader, Loaders
from penstock.gateway.repository.rate_limits import build_rate_limiter
from penstock.gateway.repository.settings import RepositorySettings
from penstock.gateway.repository.storage import Repository
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.upstream.other_servers import UPSTREAM_BACKEND, OtherServers
from penstock.gateway.usage.ledger import UsageLedger

if TYPE_CHECKING:  # needs the extra [otel]
    from penstock.gateway.spans.request_spans import RequestSpans


NO_TRAFFIC_RULES = "a server with --load-on-demand cannot have traffic rules"


def build_on_demand(config: Config) -> OnDemand | None:
    """Raises ConfigError for options that do not fit together."""
    repository = config.repository
    if not repository.load_on_demand:
        usual = RepositoryConfig()
        for name in ("load_on_demand_wait", "load_on_demand_queue", "unload_after_idle"):
            if getattr(repository, name) != getattr(usual, name):
                raise ConfigError(f"{name.replace('_', '-')}: needs --load-on-demand")
        return None
    if repository.model_control_mode != "explicit":
        raise ConfigError("load-on-demand: needs --model-control-mode=explicit")
    if config.traffic.traffic:
        raise ConfigError(f"traffic: {NO_TRAFFIC_RULES}")
    return OnDemand(
        OnDemandSettings(
            wait_seconds=repository.load_on_demand_wait,
            most_waiting=repository.load_on_demand_queue,
            idle_seconds=repository.unload_after_idle,
        )
    )


def build_dataplane(
    config: Config, pools: WorkPools, board: LoadingBoard, on_demand: OnDemand | None = None
) -> DataPlane:
    return DataPlane(
        request_timeout=config.scheduling.request_timeout or None,
        clamp_max_tokens=config.server.clamp_max_tokens,
        text_pool=pools.text,
        board=board,
        on_demand=on_demand,
    )


def build_other_servers(config: Config, dataplane: DataPlane) -> OtherServers:
    return OtherServers(config, dataplane, version("penstock"))


def build_pooling(config: Config, dataplane: DataPlane, pools: WorkPools) -> PoolingPlane:
    return PoolingPlane(dataplane, request_timeout=config.scheduling.request_timeout or None, text_pool=pools.text)


def build_budget(config: Config, gpus: GpuMetrics) -> MemoryBudget:
    """What all language models of the server may take. Raises ConfigError."""
    try:
        return MemoryBudget(config.server.memory_limit, gpus.memory)
    except InvalidRequestError as error:
        raise ConfigError(f"memory-limit: {error.message}") from None


def build_repository(
    config: Config,
    dataplane: DataPlane,
    metrics: CustomMetrics,
    budget: MemoryBudget,
    board: LoadingBoard,
    other_servers: OtherServers,
    observe: Callable[[InferModel], None] | None = None,
    on_demand: OnDemand | None = None,
    new_door: Callable[[], DoorSpec] | None = None,
) -> ModelRepository:
    """The models of the repositories, classic ones and language models; `observe` is called with each before it serves.
    `new_door`: as for `build_model`.

    Raises ConfigError.
    """
    settings = repository_settings(config.repository)
    if on_demand is not None:
        budget.make_room = on_demand.make_room
    loader = _loaders(config, settings, dataplane, budget, board, other_servers, new_door)
    cache = build_cache(config.repository.cache_config, config.repository.response_cache_byte_size)
    repositories = _repositories(config)
    return ModelRepository(
        settings,
        loader,
        repositories,
        metric=metrics.metric,
        board=board,
        cache=cache,
        observe=observe,
        on_demand=on_demand,
        language_backends=LANGUAGE_BACKENDS,
    )


def check_models(config: Config, gpus: int | None) -> list[Verdict]:
    """What would become of the repositories' models, on a machine with so many GPUs (None: those that are there).
    Raises ConfigError, EngineError."""
    settings = repository_settings(config.repository)
    if gpus is not None:
        settings = replace(settings, gpus=gpus)
    board = LoadingBoard()
    dataplane = build_dataplane(config, WorkPools(), board)
    others = build_other_servers(config, dataplane)
    backends = _loaders(config, settings, dataplane, build_budget(config, GpuMetrics()), board, others)
    cache = build_cache(config.repository.cache_config, config.repository.response_cache_byte_size)
    limits_rates = config.repository.rate_limit != "off"
    beside = [unloaded_config(name) for name in embedding_names(config)]
    check = RepositoryCheck(settings, backends, has_cache=cache is not None, limits_rates=limits_rates, beside=beside)
    return check.verdicts(_repositories(config))


def embedding_names(config: Config) -> list[str]:
    """Of --embedding-model. Raises ConfigError."""
    names = []
    for text in config.embeddings.embedding_model:
        name, equals, _ = text.partition("=")
        names.append(name if equals or is_hub_id(text) else find_model(text).name)
    return names


def _loaders(
    config: Config,
    settings: RepositorySettings,
    dataplane: DataPlane,
    budget: MemoryBudget,
    board: LoadingBoard,
    other_servers: OtherServers,
    new_door: Callable[[], DoorSpec] | None = None,
) -> Loaders:
    """By the backend's name."""
    limiter = build_rate_limiter(config.repository.rate_limit, config.repository.rate_limit_resource)
    counted = budget if config.repository.load_on_demand else None
    if settings.backend_options.get(UPSTREAM_BACKEND):
        raise ConfigError(f"backend-config: the backend {UPSTREAM_BACKEND} has no settings")
    classic = ClassicLoaders(settings.backend_options, limiter, counted)

    async def build(own: Config, name: str) -> LoadedModel:
        check_installed(own.model.engine)
        report = board.reporter([name])
        try:
            source = await fetch_model(own.model.model, report, own.model.revision)
            own = await fetch_draft_model(own, report)
        finally:
            report(None)
        # in a thread: a large tokenizer takes its time
        return await asyncio.to_thread(build_model, own, source, [name], budget, board, new_door)

    language = language_loaders(config, dataplane, build, settings.backend_options)

    def loader(backend: str, folder: Path | None = None) -> Loader:
        if backend == UPSTREAM_BACKEND:
            return other_servers.loader()
        return language.get(backend) or classic(backend, folder)

    return loader


def _repositories(config: Config) -> list[Repository]:
    try:
        return [Repository(url) for url in config.repository.model_repository]
    except ConfigError as error:
        raise ConfigError(f"model-repository: {error}") from None


def repository_settings(config: RepositoryConfig) -> RepositorySettings:
    """Raises ConfigError for options that do not fit together."""
    if config.load_model and config.model_control_mode != "explicit":
        raise ConfigError("load-model: needs --model-control-mode=explicit")
    options: dict[str, dict[str, str]] = {}
    for text in config.backend_config:
        head, equals, value = text.partition("=")
        backend, _, name = head.rpartition(",")  # without a backend: a setting of all of them
        if not equals or not name:
            raise ConfigError(f"backend-config: {text!r} is neither BACKEND,KEY=VALUE nor KEY=VALUE")
        known = {*backend_names(), *LANGUAGE_BACKENDS, UPSTREAM_BACKEND}
        if backend and backend not in known and not config.backend_directory:
            raise ConfigError(f"backend-config: no backend is called {backend!r}")
        options.setdefault(backend, {})[name] = value
    if config.backend_directory:
        options.setdefault("python", {}).setdefault("backend-directory", config.backend_directory)
    return RepositorySettings(
        control_mode=config.model_control_mode,
        poll_seconds=config.repository_poll_secs,
        load_models=config.load_model,
        strict_readiness=config.strict_readiness,
        exit_on_error=config.exit_on_error,
        auto_complete=not config.disable_auto_complete_config,
        load_threads=config.model_load_thread_count,
        load_retries=config.model_load_retry_count,
        config_name=config.model_config_name,
        gpus=visible_gpus(),
        backend_options=options,
    )


def build_kserve(
    config: Config,
    models: ModelStore,
    dataplane: DataPlane,
    pools: WorkPools,
    health: ServerHealth,
    on_demand: OnDemand | None = None,
) -> KServe:
    """What the KServe fronts share. Raises ConfigError."""
    server = config.server
    return KServe(
        models=models,
        shared_memory=SharedMemoryRegions(server.allow_client_shm),
        tracing=build_tracing(server.trace_config),
        logs=LogSettings(switches=server.log_switches),
        name=server.id,
        version=version("penstock"),
        max_input_bytes=server.http_max_input_size,
        header_forward_pattern=_header_pattern("http-header-forward-pattern", server.http_header_forward_pattern),
        health=health,
        pools=pools,
        on_demand=on_demand,
    )


def build_load_reports(config: Config, dataplane: DataPlane, ended: EndedRequests) -> LoadReporter:
    """What balancers are told with answers: of all language models, and of the requests that have `ended`."""

    def engines() -> list[EngineLoad]:
        return [
            EngineLoad(model.engine.stats, model.engine.info.block_size, model.max_num_seqs)
            for _, model in dataplane.loaded_models()
        ]

    form = config.server.load_reports
    return LoadReporter(ServerLoad(engines, ended), None if form == "request" else ReportForm(form))


_TRACE_NAMES = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "mode": "trace_mode",
    "triton,log-frequency": "log_frequency",
}


def build_tracing(settings: tuple[str, ...]) -> Tracing:
    """From `--trace-config` as Triton takes it. Raises ConfigError."""
    file, given = "", dict[str, Any]()
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or (name != "triton,file" and name not in _TRACE_NAMES):
            raise ConfigError(f"trace-config: {text!r} is not a setting of the request trace")
        if name == "triton,file":
            file = value
        elif name == "level":
            given.setdefault("trace_level", []).append(value)
        else:
            given[_TRACE_NAMES[name]] = value
    try:
        return Tracing(file, TraceSettings(**changes(given)))
    except PenstockError as error:
        raise ConfigError(f"trace-config: {error.message}") from None


def _header_pattern(flag: str, text: str) -> re.Pattern[str] | None:
    try:
        return forward_pattern(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def grpc_settings(config: Config) -> GrpcSettings:
    """Raises ConfigError."""
    server, grpc = config.server, config.grpc
    return GrpcSettings(
        host=server.address("grpc"),
        port=server.grpc_port,
        transport=grpc.grpc_transport,
        max_message_bytes=server.http_max_input_size,
        tls=tls_settings(config, "grpc"),
        keepalive_time=grpc.grpc_keepalive_time,
        keepalive_timeout=grpc.grpc_keepalive_timeout,
        keepalive_permit_without_calls=grpc.grpc_keepalive_permit_without_calls,
        http2_max_pings_without_data=grpc.grpc_http2_max_pings_without_data,
        http2_min_recv_ping_interval_without_data=grpc.grpc_http2_min_recv_ping_interval_without_data,
        http2_max_ping_strikes=grpc.grpc_http2_max_ping_strikes,
        max_connection_age=grpc.grpc_max_connection_age,
        max_connection_age_grace=grpc.grpc_max_connection_age_grace,
        infer_response_compression_level=grpc.grpc_infer_response_compression_level,
        header_forward_pattern=_header_pattern("grpc-header-forward-pattern", server.grpc_header_forward_pattern),
    )


def tls_settings(config: Config, port: Literal["http", "grpc"]) -> TlsSettings:
    section = config.http if port == "http" else config.grpc
    names = ("use_ssl", "use_ssl_mutual", "server_cert", "server_key", "root_cert")
    files = {name: getattr(section, f"{port}_{name}") for name in names}
    return TlsSettings(port=port, http2=config.server.allow_http2, **files)


def build_access_log(config: Config) -> AccessLog | None:
    given = config.access_log
    if given.access_log == "off":
        return None
    return AccessLog(sys.stderr, given.access_log, sample=given.access_log_sample, slow_s=given.access_log_slow_s)


def build_spans(config: Config) -> RequestSpans | None:
    """Raises ConfigError."""
    given = config.opentelemetry
    if given.otlp_endpoint is None:
        return None
    try:
        from penstock.gateway.spans.collector import open_spans
    except ImportError:
        raise ConfigError(
            "otlp-endpoint: needs packages that are not installed: pip install 'penstock[otel]'"
        ) from None
    try:
        return open_spans(given.otlp_endpoint, given.otlp_sample, config.server.id)
    except ValueError as error:
        raise ConfigError(f"otlp-endpoint: {error}") from None


def build_journal(access_log: AccessLog | None, spans: RequestSpans | None, *on_end: Hook) -> RequestJournal:
    """`on_end`: who else is told of requests that have ended; they are told first."""
    hooks = list(on_end)
    if access_log is not None:
        hooks.append(access_log)
    if spans is None:
        return RequestJournal(hooks)
    return RequestJournal([*hooks, spans.end], [spans.begin], [spans.leave])


def connection_limits(config: Config) -> ConnectionLimits:
    """Of an HTTP port, within what the process may have open."""
    return ConnectionLimits(
        keep_alive_timeout=config.server.keep_alive,
        body_timeout=config.server.body_timeout,
        max_connections=connections_within_limit(ConnectionLimits().max_connections),
    )


def build_keys(config: Config, ledger: UsageLedger) -> ApiKeys:
    """Raises ConfigError."""
    return ApiKeys(granted_keys(config, ledger) if config.server.has_keys else None)


def granted_keys(config: Config, ledger: UsageLedger) -> dict[bytes, Principal]:
    """Whom each key lets in, by its digest; their budgets are compared with the ledger. Raises ConfigError."""
    server = config.server
    granted = read_keys(Path(server.api_key_file), config.scheduling.policy) if server.api_key_file else {}
    for keys, roles in ((server.api_key, USER_ROLES), (server.admin_key, ALL_ROLES)):
        for key in keys:
            digest = key_digest(key.encode())
            granted[digest] = Principal(tenant=_tenant(key), key=key_id(digest), roles=roles)
    ledger.watch(granted.values())
    return granted


def build_restrictions(config: Config) -> tuple[Restrictions, Restrictions]:
    """Of HTTP and of gRPC. Raises ConfigError."""
    server, built = config.server, []
    for flag, texts, prefix in (
        ("http-restricted-api", server.http_restricted_api, ""),
        ("grpc-restricted-protocol", server.grpc_restricted_protocol, "triton-grpc-protocol-"),
    ):
        try:
            built.append(read_restrictions(texts, prefix))
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from None
    return built[0], built[1]


def app_settings(
    config: Config,
    keys: ApiKeys,
    metrics: Metrics,
    journal: RequestJournal,
    health: ServerHealth,
    load: LoadReporter | None = None,
    other_servers: OtherServers | None = None,
) -> AppSettings:
    return AppSettings(
        version=version("penstock"),
        policy=config.scheduling.policy,
        keys=keys,
        restrictions=build_restrictions(config)[0],
        browsers=browser_rules(config.server, "http"),
        metrics=metrics.page,
        health=health,
        journal=journal,
        load=load,
        heartbeat_s=config.server.heartbeat_s,
        resumable_streams=config.server.resumable_streams,
        intake=Intake(config.server.body_memory, config.server.max_loop_lag),
        stored_responses=config.server.stored_responses,
        stored_responses_memory=config.server.stored_responses_memory,
        stored_responses_per_tenant=config.server.stored_responses_per_tenant,
        stored_responses_memory_per_tenant=config.server.stored_responses_memory_per_tenant,
        text_models=TextModels() if other_servers is None else other_servers.models,
        background_responses=config.server.background_responses,
        background_responses_per_tenant=config.server.background_responses_per_tenant,
    )


def open_database(config: Config) -> Database:
    """In the server's folder; in memory where it has none. Raises ConfigError."""
    if config.data.data_dir is None:
        return Database(None)
    folder = Path(config.data.data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Database(folder / "penstock.sqlite")
    except (OSError, sqlite3.Error) as error:
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
    config: Config, database: Database, endpoints: Mapping[str, ASGIApp], settings: AppSettings
) -> BatchService | None:
    """None where the server has no folder for them. Raises ConfigError."""
    given = config.data
    if given.data_dir is None:
        return None
    bounds = FileBounds(
        bytes=given.data_size,
        bytes_of_tenant=given.data_size_per_tenant or given.data_size,
        files_of_tenant=_MOST_FILES_OF_TENANT,
        retention=given.data_retention or None,
    )
    return BatchService(Path(given.data_dir), database, bounds, given.batch_lines_in_flight, endpoints, settings)


_MOST_FILES_OF_TENANT = 10_000
"""As many as one page of GET /v1/files shows."""


def metrics_settings(config: Config, settings: AppSettings) -> AppSettings:
    """The metrics port's, from those of the main one. Raises ConfigError."""
    server = config.server
    keys = settings.keys
    if keys.needed and not asks_for_keys(server, "metrics"):
        keys = keys.letting_in(_SCRAPER)
    return replace(settings, keys=keys, browsers=browser_rules(server, "metrics"))


_SCRAPER = Principal(roles=frozenset({Role.METRICS}))


def _tenant(key: str) -> str:
    """A name for the holder of a key that gives nothing of the key away."""
    return "key-" + hashlib.sha256(b"penstock tenant\0" + key.encode()).hexdigest()[:16]
