"""Builders of what the ports of a server need, from its configuration: settings, keys, limits, and what the KServe
fronts share."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from socket import socket
from typing import Any, Literal

from penstock.engines import __version__
from penstock.engines.errors import PenstockError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.apis.kserve.logs import LogSettings
from penstock.gateway.apis.kserve.parameters import NeverMatches, forward_pattern
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.apis.kserve.trace_settings import TraceSettings, changes
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.apis.usage.ledger import UsageLedger
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.metrics.registry import Metrics
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.acceptor import connections_within_limit
from penstock.gateway.requests.access import ApiKeys, Restrictions, key_digest, key_id, read_restrictions
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import ALL_ROLES, USER_ROLES, Principal, Role
from penstock.gateway.requests.exposure import asks_for_keys, browser_rules
from penstock.gateway.requests.intake import BodyIntake, WorkPools
from penstock.gateway.requests.key_file import read_keys
from penstock.gateway.requests.load_report import LoadReporter
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.transports.http.server import ServerSettings
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits

logger = logging.getLogger(__name__)


def build_kserve(
    config: Config,
    models: ModelStore,
    dataplane: DataPlane,
    pools: WorkPools,
    health: ServerHealth,
) -> KServe:
    """What the KServe fronts share. Raises ConfigError."""
    server = config.server
    return KServe(
        names=dataplane.models,
        models=models,
        shared_memory=SharedMemoryRegions(server.allow_client_shm),
        tracing=build_tracing(server.trace_config),
        logs=LogSettings(server.log_file, switches=server.log_switches),
        name=server.id,
        version=__version__,
        max_input_bytes=server.http_max_input_size,
        header_forward_pattern=_header_pattern("http-header-forward-pattern", server.http_header_forward_pattern),
        health=health,
        pools=pools,
    )


_TRACE_NAMES = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "mode": "trace_mode",
    "triton,log-frequency": "log_frequency",
}


_TRACE_LEVELS = {"false": "OFF", **dict.fromkeys(("true", "on", "min", "max"), "TIMESTAMPS")}
"""What Triton's command line takes beside the levels themselves, in any case."""


def build_tracing(settings: tuple[str, ...]) -> Tracing:
    """From `--trace-config` as Triton takes it. Raises ConfigError."""
    file, fields = "", dict[str, Any]()
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or (name != "triton,file" and name not in _TRACE_NAMES):
            raise ConfigError(f"trace-config: {text!r} is not a setting of the request trace")
        if name == "triton,file":
            file = value
        elif name == "level":
            level = _TRACE_LEVELS.get(value.lower(), value.upper())
            fields.setdefault("trace_level", []).append(level)
        else:
            fields[_TRACE_NAMES[name]] = value.lower() if name == "mode" else value
    try:
        return Tracing(file, TraceSettings(**changes(fields)))
    except PenstockError as error:
        raise ConfigError(f"trace-config: {error.message}") from None


def _header_pattern(flag: str, text: str) -> re.Pattern[str] | None:
    try:
        return forward_pattern(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


@cache
def _metadata_pattern(text: str) -> re.Pattern[str] | None:
    """Names of metadata are in small letters whatever a client writes: with Triton such a pattern matches nothing, too.
    Names of HTTP headers are not, there."""
    try:
        return _header_pattern("grpc-header-forward-pattern", text)
    except ConfigError as error:
        if not isinstance(error.__cause__, NeverMatches):
            raise
        logger.warning("%s", error)
        return None


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
        header_forward_pattern=_metadata_pattern(server.grpc_header_forward_pattern),
    )


def tls_settings(config: Config, port: Literal["http", "grpc"]) -> TlsSettings:
    section = config.http if port == "http" else config.grpc
    names = ("use_ssl", "use_ssl_mutual", "server_cert", "server_key", "root_cert")
    files = {name: getattr(section, f"{port}_{name}") for name in names}
    return TlsSettings(port=port, http2=config.server.allow_http2, **files)


def http_settings(config: Config, intake: BodyIntake, listener: socket | None = None) -> ServerSettings:
    """Of the public HTTP port. `listener` is bound already; None: the port binds its address."""
    server = config.server
    return ServerSettings(
        host=server.address("http"),
        port=server.http_port,
        listener=listener,
        tls=tls_settings(config, "http"),
        limits=replace(connection_limits(config), send_timeout=server.send_timeout),
        intake=intake,
        http2=server.allow_http2,
    )


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
    granted = read_keys(Path(server.api_key_file), config.models.scheduling.policy) if server.api_key_file else {}
    for keys, roles in ((server.api_key, USER_ROLES), (server.admin_key, ALL_ROLES)):
        for key in keys:
            digest = key_digest(key.encode())
            granted[digest] = Principal(tenant=_tenant(key), key=key_id(digest), roles=roles)
    ledger.watch(granted.values())
    return granted


def build_restrictions(config: Config, port: Literal["http", "grpc"]) -> Restrictions:
    """Raises ConfigError."""
    server = config.server
    flag, texts, prefix = (
        ("http-restricted-api", server.http_restricted_api, "")
        if port == "http"
        else ("grpc-restricted-protocol", server.grpc_restricted_protocol, "triton-grpc-protocol-")
    )
    try:
        return read_restrictions(texts, prefix)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def app_settings(
    config: Config,
    keys: ApiKeys,
    metrics: Metrics,
    journal: RequestJournal,
    health: ServerHealth,
    load: LoadReporter | None = None,
) -> AppSettings:
    return AppSettings(
        version=__version__,
        policy=config.models.scheduling.policy,
        keys=keys,
        restrictions=build_restrictions(config, "http"),
        browsers=browser_rules(config.server, "http"),
        metrics=metrics.page,
        health=health,
        journal=journal,
        load=load,
        heartbeat_s=config.server.heartbeat_s,
        resumable_streams=config.server.resumable_streams,
        intake=BodyIntake(config.server.body_memory, config.server.max_loop_lag),
        stored_responses=config.server.stored_responses,
        stored_responses_memory=config.server.stored_responses_memory,
        stored_responses_per_tenant=config.server.stored_responses_per_tenant,
        stored_responses_memory_per_tenant=config.server.stored_responses_memory_per_tenant,
        default_model=config.server.default_model,
        background_responses=config.server.background_responses,
        background_responses_per_tenant=config.server.background_responses_per_tenant,
    )


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
