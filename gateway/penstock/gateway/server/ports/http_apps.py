"""The apps of the ports: the table of all routes, access control before them, and one place where every error becomes a
response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from penstock.engines.errors import PenstockError
from penstock.gateway.apis.anthropic import routes as anthropic
from penstock.gateway.apis.batches.routes import file_routes, message_batch_routes
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.routes import kserve_routes
from penstock.gateway.apis.ollama import routes as ollama
from penstock.gateway.apis.openai import routes as openai
from penstock.gateway.apis.openai.models import ModelObjects
from penstock.gateway.apis.pooling.routes import pooling_routes
from penstock.gateway.apis.responses.routes import chat_routes, conversation_routes, response_routes
from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.apis.usage.ledger import UsageLedger
from penstock.gateway.apis.usage.routes import usage_routes
from penstock.gateway.database import Database
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.models.traffic.routes import traffic_routes
from penstock.gateway.models.traffic.table import TrafficTable
from penstock.gateway.requests.access import SEE_METADATA, Access
from penstock.gateway.requests.call import ClientGone
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.server.ports.about import OpenApi, about_route
from penstock.gateway.server.ports.health import health_routes, info_routes, ping_routes
from penstock.gateway.transports.http.access_control import AccessControl, CrossOrigin
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import SERVER, Handle, Match, NoRoute, Route, Routes
from penstock.gateway.transports.http.settings import AppSettings

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams

logger = logging.getLogger(__name__)


def build_app(
    dataplane: DataPlane,
    settings: AppSettings,
    kserve: KServe | None = None,
    pooling: PoolingPlane | None = None,
    batches: BatchService | None = None,
    responses: ResponseService | None = None,
    traffic: TrafficTable | None = None,
    ledger: UsageLedger | None = None,
    extra_routes: Sequence[Route] = (),
) -> App:
    """The public port: the OpenAI API, the Anthropic API, and KServe v2 below /v2, behind the same keys."""
    pooling = pooling or PoolingPlane(dataplane.models)
    responses = responses or ResponseService(Database(None), settings)
    resumable, health = _resumable_streams(settings), _health(dataplane, settings)
    objects = ModelObjects(dataplane.models)
    routes = [
        *openai.text_routes(dataplane, settings, responses.chats, resumable),
        *chat_routes(responses.chats),
        *response_routes(dataplane, settings, responses),
        *conversation_routes(responses, settings),
        *anthropic.message_routes(dataplane, settings),
        *pooling_routes(pooling, settings),
        *file_routes(batches),
        *message_batch_routes(batches, settings),
        *ollama.text_routes(dataplane, settings),
        *ollama.embedding_routes(pooling, settings),
        *ollama.model_routes(dataplane.models, settings),
        *traffic_routes(TrafficTable() if traffic is None else traffic),
        *usage_routes(ledger),
        *openai.model_routes(objects, None if kserve is None else kserve.models),
        *anthropic.model_routes(objects),
        *openai.adapter_routes(dataplane, settings),
        *openai.engine_routes(dataplane),
        *openai.token_routes(dataplane, settings),
        *health_routes(settings, health),
        *ping_routes(settings, health),
        *info_routes(dataplane.models, settings),
        *([] if kserve is None else kserve_routes(kserve)),
        *extra_routes,
    ]
    routes.append(Route("GET", "/openapi.json", SEE_METADATA, OpenApi(settings, routes).show, SERVER))
    routes.append(about_route(settings, routes))
    control = AccessControl(settings, resumable.may_be_read_by) if resumable is not None else None
    return App(routes, settings, control)


def _resumable_streams(settings: AppSettings) -> ResumableStreams | None:
    """Loaded only where it is asked for."""
    if not settings.resumable_streams:
        return None
    from penstock.gateway.generating.resumable_streams import ResumableStreams

    return ResumableStreams(settings, settings.resumable_streams)


def batch_endpoints(dataplane: DataPlane, settings: AppSettings, pooling: PoolingPlane) -> dict[str, Handle]:
    """What lines of batches may ask, by path. Their responses are in a file: they are not kept beside it."""
    keeping_nothing = ResponseService(Database(None), replace(settings, stored_responses=0))
    routes = (
        *openai.text_routes(dataplane, settings),
        *response_routes(dataplane, settings, keeping_nothing),
        *anthropic.message_routes(dataplane, settings),
        *pooling_routes(pooling, settings),
    )
    return {route.path: route.handle for route in routes if route.method == "POST" and _is_for_lines(route.path)}


def _is_for_lines(path: str) -> bool:
    """What counts tokens, or ends a response, is asked at once."""
    return "{" not in path and not path.endswith(("/count_tokens", "/input_tokens"))


def build_metrics_app(dataplane: DataPlane, settings: AppSettings, extra_routes: Sequence[Route] = ()) -> App:
    """The metrics port: metrics and health."""
    routes = [*health_routes(settings, _health(dataplane, settings)), *extra_routes]
    return App([*routes, about_route(settings, routes)], settings)


def _health(dataplane: DataPlane, settings: AppSettings) -> ServerHealth:
    return settings.health or ServerHealth(lambda: dataplane.models.live, lambda: dataplane.models.ready)


class App:
    """Plain ASGI: a port's routes behind its access control. Routes are found without starlette's Router, whose own
    coroutines would lie on the way of every token."""

    def __init__(self, routes: Sequence[Route], settings: AppSettings, control: AccessControl | None = None) -> None:
        self.routes = Routes(routes)
        self._drain = settings.drain
        self._bodies = settings.intake.bodies
        self._pool = settings.pools.tensors
        self._journal = settings.journal
        self._access_control = control or AccessControl(settings)
        self._cross_origin = CrossOrigin(settings.browsers.origins) if settings.browsers.origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"This server has no use for ASGI scopes of type {scope['type']}.")
        self.routes.drop_trailing_slash(scope)
        exchange = Exchange(scope, receive, send, self._drain, self._bodies, self._pool)
        match = self.routes.find(scope)
        exchange.error_form = match.api.errors
        self._journal.begin(exchange.context)
        try:
            await self._answer(exchange, match)
        except asyncio.CancelledError:
            exchange.context.record.cancelled()
            raise
        finally:
            exchange.close_record()
            self._journal.end(exchange.context)

    def access(self, scope: Scope) -> Access | None:
        """Of the route that a request asks for; None where there is none."""
        match = self.routes.find(scope)
        return match.route.access if isinstance(match, Match) else None

    async def _answer(self, exchange: Exchange, match: Match | NoRoute) -> None:
        if self._cross_origin is not None:
            methods = partial(self.routes.methods, exchange.scope)
            if await self._cross_origin.answered(exchange, methods):
                return
        try:
            if isinstance(match, NoRoute):
                self._access_control.admit(exchange, None)
                raise match.error
            exchange.names = match.names
            exchange.context.record.route = match.route.name
            self._access_control.admit(exchange, match.route.access)
            await match.route.handle(exchange)
        except ClientGone:
            exchange.context.record.cancelled()
        except PenstockError as error:
            await exchange.fail(error)
        except Exception as error:
            logger.exception("Unexpected error")
            await exchange.fail(error)
