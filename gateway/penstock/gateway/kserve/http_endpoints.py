"""The table of everything below /v2: what answers, and who may use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.gateway.front.access import (
    CHANGE_LOGGING,
    CHANGE_MODELS,
    CHANGE_TRACE,
    INFER,
    OWN_MEMORY,
    PROBE,
    SEE_CONFIG,
    SEE_LOGGING,
    SEE_MEMORY,
    SEE_METADATA,
    SEE_READINESS,
    SEE_REPOSITORY,
    SEE_STATISTICS,
    SEE_TRACE,
    Access,
)
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve import http_models, repository_http, settings_http
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.generate import generate
from penstock.gateway.kserve.http_infer import infer

Answer = Callable[..., Awaitable[None]]
"""Called with the exchange and the names in the path."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    access: Access
    answer: Answer


Verbs = Mapping[str, Endpoint]
"""By method."""


def fixed_routes(context: KServe) -> dict[str, Verbs]:
    def bound(access: Access, answer: Any, **options: Any) -> Endpoint:
        return Endpoint(access, partial(answer, context, **options))

    routes: dict[str, Verbs] = {
        "/v2": {"GET": bound(SEE_METADATA, http_models.server)},
        "/v2/health/live": {"GET": bound(PROBE, http_models.live)},
        "/v2/health/ready": {"GET": bound(PROBE, http_models.ready)},
        "/v2/models/stats": {"GET": bound(SEE_STATISTICS, http_models.model_statistics)},
        "/v2/logging": {
            "GET": bound(SEE_LOGGING, settings_http.log_settings, update=False),
            "POST": bound(CHANGE_LOGGING, settings_http.log_settings, update=True),
        },
        "/v2/trace/setting": {
            "GET": bound(SEE_TRACE, settings_http.trace_settings, update=False),
            "POST": bound(CHANGE_TRACE, settings_http.trace_settings, update=True),
        },
        "/v2/repository/index": {"POST": bound(SEE_REPOSITORY, repository_http.repository_index)},
    }
    for kind in ("system", "cuda"):
        status = bound(SEE_MEMORY, settings_http.shared_memory_status, kind=kind)
        unregister = bound(OWN_MEMORY, settings_http.unregister_shared_memory, kind=kind)
        routes[f"/v2/{kind}sharedmemory/status"] = {"GET": status}
        routes[f"/v2/{kind}sharedmemory/unregister"] = {"POST": unregister}
    return routes


def model_routes(context: KServe) -> dict[tuple[str, ...], Verbs]:
    """By what stands behind the model's name and version."""

    async def trace_setting(exchange: Exchange, name: str, version: str, *, update: bool) -> None:
        await settings_http.trace_settings(context, exchange, name, update=update)

    return {
        (): {"GET": Endpoint(SEE_METADATA, partial(http_models.metadata, context))},
        ("infer",): {"POST": Endpoint(INFER, partial(infer, context))},
        ("generate",): {"POST": Endpoint(INFER, partial(generate, context, stream=False))},
        ("generate_stream",): {"POST": Endpoint(INFER, partial(generate, context, stream=True))},
        ("ready",): {"GET": Endpoint(SEE_READINESS, partial(http_models.model_ready, context))},
        ("config",): {"GET": Endpoint(SEE_CONFIG, partial(http_models.config, context))},
        ("stats",): {"GET": Endpoint(SEE_STATISTICS, partial(http_models.model_statistics, context))},
        ("trace", "setting"): {
            "GET": Endpoint(SEE_TRACE, partial(trace_setting, update=False)),
            "POST": Endpoint(CHANGE_TRACE, partial(trace_setting, update=True)),
        },
    }


def repository_routes(context: KServe) -> dict[str, Verbs]:
    return {
        "load": {"POST": Endpoint(CHANGE_MODELS, partial(repository_http.load_model, context))},
        "unload": {"POST": Endpoint(CHANGE_MODELS, partial(repository_http.unload_model, context))},
    }


def region_routes(context: KServe, kind: str) -> dict[str, Verbs]:
    async def status(exchange: Exchange, region: str) -> None:
        await settings_http.shared_memory_status(context, exchange, kind, region)

    async def register(exchange: Exchange, region: str) -> None:
        await settings_http.register_shared_memory(context, exchange, kind, region)

    async def unregister(exchange: Exchange, region: str) -> None:
        await settings_http.unregister_shared_memory(context, exchange, kind, region)

    return {
        "status": {"GET": Endpoint(SEE_MEMORY, status)},
        "register": {"POST": Endpoint(OWN_MEMORY, register)},
        "unregister": {"POST": Endpoint(OWN_MEMORY, unregister)},
    }


async def _no_repository_name(exchange: Exchange) -> None:
    raise UnsupportedError("'repository_name' specification is not supported")


ELSEWHERE: Mapping[str, Verbs] = {
    "index": {"POST": Endpoint(SEE_REPOSITORY, _no_repository_name)},
    "load": {"POST": Endpoint(CHANGE_MODELS, _no_repository_name)},
    "unload": {"POST": Endpoint(CHANGE_MODELS, _no_repository_name)},
}
"""What names a repository."""
