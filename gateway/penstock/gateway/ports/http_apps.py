"""The ASGI app: routes, keys by default, and one place where every error becomes a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engines.errors import PenstockError
from penstock.gateway.front.auth import ApiKeys
from penstock.gateway.front.record import UNMATCHED
from penstock.gateway.http.browser_guard import BrowserGuard
from penstock.gateway.http.cross_origin import CrossOrigin
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.http_routes import KServeApp
from penstock.gateway.llm.adapter_control import AdapterControl
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.openai.adapters import LoadAdapter, UnloadAdapter
from penstock.gateway.openai.chat import ChatCompletions
from penstock.gateway.openai.completions import Completions
from penstock.gateway.openai.models import ModelDetail, ModelList
from penstock.gateway.ports.about import About
from penstock.gateway.ports.health import Live, Metrics, Ready, Version
from penstock.gateway.ports.request_paths import drop_trailing_slash, route_error

logger = logging.getLogger(__name__)


def build_app(dataplane: DataPlane, settings: AppSettings, kserve: KServe | None = None) -> ASGIApp:
    """The public port: the OpenAI API, and KServe v2 below /v2, behind the same keys."""
    adapters = AdapterControl(dataplane)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(dataplane, settings), methods=["POST"]),
        Route("/v1/completions", Completions(dataplane, settings), methods=["POST"]),
        Route("/v1/models", ModelList(dataplane), methods=["GET"]),
        Route("/v1/models/{name:path}", ModelDetail(dataplane), methods=["GET"]),
        Route("/v1/load_lora_adapter", LoadAdapter(adapters, settings), methods=["POST"]),
        Route("/v1/unload_lora_adapter", UnloadAdapter(adapters, settings), methods=["POST"]),
        *_health_routes(dataplane, settings),
        Route("/version", Version(dataplane, settings), methods=["GET"]),
    ]
    routes.append(Route("/", About(settings, routes, kserve=kserve is not None), methods=["GET"]))
    return _App(routes, settings, KServeApp(kserve) if kserve is not None else None)


def build_metrics_app(dataplane: DataPlane, settings: AppSettings, extra_routes: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The metrics port: metrics and health."""
    return _App([*_health_routes(dataplane, settings), *extra_routes], settings)


def _health_routes(dataplane: DataPlane, settings: AppSettings) -> list[Route]:
    return [
        Route("/health", Live(dataplane), methods=["GET"]),
        Route("/health/live", Live(dataplane), methods=["GET"]),
        Route("/health/ready", Ready(dataplane, settings), methods=["GET"]),
        Route("/metrics", Metrics(settings), methods=["GET"]),
    ]


class _App:
    """Plain ASGI. Every path but `open_paths` needs a key, whether a route exists for it or not, or where there are no
    keys, has to pass the browser guard. What is compared is `scope["path"]`, which no Host header can bend."""

    def __init__(self, routes: Sequence[BaseRoute], settings: AppSettings, kserve: KServeApp | None = None) -> None:
        self._router = Router(routes, redirect_slashes=False)
        self._plain = {route.path: route for route in routes if isinstance(route, Route) and "{" not in route.path}
        """Routes that a look-up finds; the router's own coroutines would lie on the way of every token."""
        self._patterns = [route for route in routes if isinstance(route, Route) and "{" in route.path]
        self._settings = settings
        self._keys = ApiKeys(settings.api_keys)
        self._guard = BrowserGuard(settings.browsers)
        self._cross_origin = CrossOrigin(settings.browsers.origins) if settings.browsers.origins else None
        self._kserve = kserve
        self._journal = settings.journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"This server has no use for ASGI scopes of type {scope['type']}.")
        kserve = self._kserve if self._kserve is not None and self._kserve.handles(scope["path"]) else None
        if kserve is None:  # Triton knows no paths with a slash at the end
            drop_trailing_slash(scope)
        exchange = Exchange(scope, receive, send, self._settings.drain)
        scope[SCOPE_KEY] = exchange
        self._journal.begin(exchange.context)
        try:
            await self._answer(exchange, kserve)
        except asyncio.CancelledError:
            exchange.context.record.cancelled()
            raise
        finally:
            exchange.close_record()
            self._journal.end(exchange.context)

    async def _answer(self, exchange: Exchange, kserve: KServeApp | None) -> None:
        scope, receive = exchange.scope, exchange.receive
        if self._cross_origin is not None and await self._cross_origin.answered(exchange):
            return
        if kserve is not None:
            await self._answer_kserve(kserve, exchange)
            return
        scope["app"] = self  # makes starlette raise its 404 and 405 instead of answering in its own shape
        try:
            route = self._plain.get(scope["path"])
            exchange.context.record.route = route.path if route is not None else self._pattern(scope["path"])
            self._admit(exchange)
            if route is not None and scope["method"] in (route.methods or ()):
                await route.app(scope, receive, exchange.send)
            else:
                await self._router(scope, receive, exchange.send)
        except PenstockError as error:
            await exchange.fail(error)
        except HTTPException as error:
            await exchange.fail(route_error(error, scope, self._router.routes))
        except Exception as error:
            logger.exception("Unexpected error")
            await exchange.fail(error)

    def _pattern(self, path: str) -> str:
        """The route with names in its path that this one matches, as the table has it."""
        for route in self._patterns:
            if route.path_regex.match(path):
                return route.path.replace(":path", "")
        return UNMATCHED

    def _admit(self, exchange: Exchange) -> None:
        """Raises AuthenticationError, HttpError, InvalidRequestError."""
        if exchange.scope["path"] in self._settings.open_paths:  # kubelets send a pod's address as Host
            return
        authorization = exchange.only_header(b"authorization")
        if self._keys.needed:
            exchange.context.principal = self._keys.principal(authorization)
        else:
            self._guard.check(exchange)

    async def _answer_kserve(self, kserve: KServeApp, exchange: Exchange) -> None:
        """Below /v2 errors have another shape, which that app knows."""
        try:
            self._admit(exchange)
        except PenstockError as error:
            await kserve.fail(exchange, error)
        else:
            await kserve(exchange.scope, exchange.receive, exchange.send)
