"""The HTTP port of a front: what it serves itself, and what it leaves to the supervisor.

Only requests that need nothing but a model are served here: one whose engine this front is attached to, or one of the
model host. The supervisor gets all others as they are, checks them and tells of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.anthropic import routes as anthropic
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.routes import KSERVE, kserve_routes
from penstock.gateway.apis.ollama import routes as ollama
from penstock.gateway.apis.ollama.errors import OLLAMA
from penstock.gateway.apis.ollama.schemas import model_name
from penstock.gateway.apis.openai import routes as openai
from penstock.gateway.processes.fronts.forwarding import Forwarder
from penstock.gateway.processes.fronts.front_models import FrontModels
from penstock.gateway.processes.fronts.quotas import QuotaClient
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.server.ports.http_apps import App
from penstock.gateway.transports.http.access_control import AccessControl
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import OPENAI, Handle, Match, Route
from penstock.gateway.transports.http.settings import AppSettings

_OF_CODED_BODY = (b"content-encoding", b"content-length")
_TENSOR_ENDPOINTS = ("/infer", "/generate", "/generate_stream")
_FILE = b'"file_id"'
"""In a body that may have an image in a file, which the supervisor has."""


class _ServedFields(msgspec.Struct):
    """What decides who serves a request; of whatever type a client sends it."""

    model: Any = ""
    stream: Any = False
    store: Any = False
    keep_alive: Any = None


class FrontApp(App):
    def __init__(
        self, models: FrontModels, settings: AppSettings, kserve: KServe, forwarder: Forwarder, quotas: QuotaClient
    ) -> None:
        def ollama_name(model: str) -> str:
            return model_name(model, models.serves)

        def own(route: Route) -> Route:
            name = ollama_name if route.api is OLLAMA else str
            resumable = settings.resumable_streams > 0 and route.api is OPENAI
            is_served = partial(_is_served, models, name, resumable)
            return replace(route, handle=_Own(route.handle, is_served, settings, forwarder, quotas).handle)

        def counted(route: Route) -> Route:
            return replace(route, handle=partial(_counted, quotas, route.handle))

        texts = (
            *openai.text_routes(models.dataplane, settings),
            *anthropic.message_routes(models.dataplane, settings),
            *ollama.text_routes(models.dataplane, settings),
            *(route for route in openai.token_routes(models.dataplane, settings) if route.method == "POST"),
        )
        routes = [*map(own, texts), *map(counted, kserve_routes(kserve))]
        super().__init__(routes, settings, _FrontAccessControl(settings))
        self._models = models
        self._forwarder = forwarder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and self._may_serve(scope):
            await super().__call__(scope, receive, send)
        else:
            await self._forwarder.http(scope, receive, send)

    def _may_serve(self, scope: Scope) -> bool:
        self.routes.drop_trailing_slash(scope)
        match = self.routes.find(scope)
        if not isinstance(match, Match):
            return False
        if match.api is not KSERVE:
            return True
        names = match.names
        return match.route.path.endswith(_TENSOR_ENDPOINTS) and self._models.has_tensors(
            names["model"], names.get("version", "")
        )


class _FrontAccessControl(AccessControl):
    """What a request may use is asked for when it is certain that it is served here."""

    def begin(self, exchange: Exchange) -> None:
        exchange.load = self._load
        self._lag.check()


async def _counted(quotas: QuotaClient, handle: Handle, exchange: Exchange) -> None:
    await quotas.count(exchange.context)
    await handle(exchange)


class _Own:
    """A route, for the requests that can be served here."""

    def __init__(
        self,
        handle: Handle,
        is_served: Callable[[bytes], bool],
        settings: AppSettings,
        forwarder: Forwarder,
        quotas: QuotaClient,
    ) -> None:
        self._handle = handle
        self._is_served = is_served
        self._journal = settings.journal
        self._limit = settings.max_body_bytes
        self._forwarder = forwarder
        self._quotas = quotas

    async def handle(self, exchange: Exchange) -> None:
        """Raises as the route's own, and ClientGone."""
        body = await exchange.body(self._limit, from_curl=True)
        if not self._is_served(body):
            self._journal.leave(exchange.context)
            scope = exchange.scope
            headers = [header for header in scope["headers"] if header[0] not in _OF_CODED_BODY]
            await self._forwarder.http({**scope, "headers": headers}, exchange.receive, exchange.raw_send, body)
            return
        await self._quotas.count(exchange.context)
        exchange.put_back(body)
        await self._handle(exchange)


def _is_served(models: FrontModels, name: Callable[[str], str], resumable: bool, body: bytes) -> bool:
    """Whether nothing but a model of this front is needed. So is nothing for a body that cannot be read: its error.
    `resumable`: streams outlive their connections, and their clients may come back to another front."""
    try:
        request = decode_json(body, _ServedFields)
    except InvalidRequestError:
        return True
    if request.store or (resumable and request.stream) or request.keep_alive is not None:
        return False
    if _FILE in body:
        return False
    return isinstance(request.model, str) and models.serves(name(request.model))
