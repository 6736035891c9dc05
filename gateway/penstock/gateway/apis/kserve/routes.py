"""Routes of KServe v2, below /v2."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from penstock.engines.errors import UnsupportedError
from penstock.gateway.apis.kserve import http_administration, http_models
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.errors import KSERVE_ERRORS
from penstock.gateway.apis.kserve.generate import generate
from penstock.gateway.apis.kserve.http_infer import infer
from penstock.gateway.requests.access import (
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
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import Api, Handle, Route

KSERVE = Api("kserve", KSERVE_ERRORS, prefix="/v2", as_triton=True)

Row = tuple[str, str, Access, Handle]
AnswerModel = Callable[[Exchange, str, str], Awaitable[None]]
"""Called with a model's name and its version, "" for the one that the model's policy says."""


def kserve_routes(context: KServe) -> list[Route]:
    rows = [*_server_rows(context), *_model_rows(context), *_repository_rows(context), *_memory_rows(context)]
    shown = [Route(method, path, access, handle, KSERVE) for method, path, access, handle in rows]
    hidden = [
        Route("POST", f"/v2/repository/{{repository}}/{rest}", access, _no_repository_name, KSERVE, is_shown=False)
        for rest, access in (
            ("index", SEE_REPOSITORY),
            ("models/{model}/load", CHANGE_MODELS),
            ("models/{model}/unload", CHANGE_MODELS),
        )
    ]
    return shown + hidden


def _server_rows(context: KServe) -> list[Row]:
    logs = partial(http_administration.log_settings, context)
    traces = partial(http_administration.trace_settings, context)
    return [
        ("GET", "/v2", SEE_METADATA, partial(http_models.server, context)),
        ("GET", "/v2/health/live", PROBE, partial(http_models.live, context)),
        ("GET", "/v2/health/ready", PROBE, partial(http_models.ready, context)),
        ("GET", "/v2/models/stats", SEE_STATISTICS, partial(http_models.model_statistics, context)),
        ("GET", "/v2/logging", SEE_LOGGING, partial(logs, update=False)),
        ("POST", "/v2/logging", CHANGE_LOGGING, partial(logs, update=True)),
        ("GET", "/v2/trace/setting", SEE_TRACE, partial(traces, update=False)),
        ("POST", "/v2/trace/setting", CHANGE_TRACE, partial(traces, update=True)),
    ]


def _model_rows(context: KServe) -> list[Row]:
    async def traces(exchange: Exchange, name: str, version: str, *, update: bool) -> None:
        await http_administration.trace_settings(context, exchange, name, update=update)

    one, traced = "/v2/models/{model}", "/v2/models/{model}/trace/setting"
    answers: tuple[tuple[str, str, Access, AnswerModel], ...] = (
        ("GET", "", SEE_METADATA, partial(http_models.metadata, context)),
        ("POST", "/infer", INFER, partial(infer, context)),
        ("POST", "/generate", INFER, partial(generate, context, stream=False)),
        ("POST", "/generate_stream", INFER, partial(generate, context, stream=True)),
        ("GET", "/ready", SEE_READINESS, partial(http_models.model_ready, context)),
        ("GET", "/config", SEE_CONFIG, partial(http_models.config, context)),
        ("GET", "/stats", SEE_STATISTICS, partial(http_models.model_statistics, context)),
    )
    return [
        *(
            (method, f"{of_model}{rest}", access, _of_model(answer))
            for method, rest, access, answer in answers
            for of_model in (one, f"{one}/versions/{{version:int}}")
        ),
        ("GET", traced, SEE_TRACE, _of_model(partial(traces, update=False))),
        ("POST", traced, CHANGE_TRACE, _of_model(partial(traces, update=True))),
    ]


def _of_model(answer: AnswerModel) -> Handle:
    return lambda exchange: answer(exchange, exchange.names["model"], exchange.names.get("version", ""))


def _repository_rows(context: KServe) -> list[Row]:
    def of_model(change: Callable[[KServe, Exchange, str], Awaitable[None]]) -> Handle:
        return lambda exchange: change(context, exchange, exchange.names["model"])

    one = "/v2/repository/models/{model}"
    return [
        ("POST", "/v2/repository/index", SEE_REPOSITORY, partial(http_administration.repository_index, context)),
        ("POST", f"{one}/load", CHANGE_MODELS, of_model(http_administration.load_model)),
        ("POST", f"{one}/unload", CHANGE_MODELS, of_model(http_administration.unload_model)),
    ]


def _memory_rows(context: KServe) -> list[Row]:
    def of_region(answer: Callable[[KServe, Exchange, str, str], Awaitable[None]], kind: str) -> Handle:
        return lambda exchange: answer(context, exchange, kind, exchange.names["region"])

    status, unregister = http_administration.shared_memory_status, http_administration.unregister_shared_memory
    register = http_administration.register_shared_memory
    rows: list[Row] = []
    for kind in ("system", "cuda"):
        every = f"/v2/{kind}sharedmemory"
        one = f"{every}/region/{{region}}"
        rows += [
            ("GET", f"{every}/status", SEE_MEMORY, partial(status, context, kind=kind)),
            ("POST", f"{every}/unregister", OWN_MEMORY, partial(unregister, context, kind=kind)),
            ("GET", f"{one}/status", SEE_MEMORY, of_region(status, kind)),
            ("POST", f"{one}/register", OWN_MEMORY, of_region(register, kind)),
            ("POST", f"{one}/unregister", OWN_MEMORY, of_region(unregister, kind)),
        ]
    return rows


async def _no_repository_name(exchange: Exchange) -> None:
    raise UnsupportedError("'repository_name' specification is not supported")
