"""The HTTP port of a front: what it serves itself, and what it leaves to the supervisor.

Only requests that need nothing but a model are served here: one whose engine this front is attached to, or one of the
model host. The supervisor gets all others as they are, checks them and tells of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.anthropic.count_tokens import CountTokens
from penstock.gateway.anthropic.messages import Messages
from penstock.gateway.errors import HttpError
from penstock.gateway.front.access import INFER, Access
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.front.call import ClientGone
from penstock.gateway.fronts.forwarding import Forwarder
from penstock.gateway.fronts.front_models import FrontModels
from penstock.gateway.fronts.quotas import QuotaClient
from penstock.gateway.http.door import Door
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.http_routes import KServeApp
from penstock.gateway.ollama.generate import Chat, Generate
from penstock.gateway.ollama.names import model_name
from penstock.gateway.openai.chat import ChatCompletions
from penstock.gateway.openai.completions import Completions
from penstock.gateway.openai.tokenize import Detokenize, Tokenize
from penstock.gateway.ports.http_apps import App
from penstock.gateway.ports.request_paths import drop_trailing_slash
from penstock.gateway.ports.routes import GuardedRoute

_OF_CODED_BODY = (b"content-encoding", b"content-length")
_TENSOR_ENDPOINTS = ("/infer", "/generate", "/generate_stream")


class _Asked(msgspec.Struct):
    """What decides who serves a request; of whatever type a client sends it."""

    model: Any = ""
    stream: Any = False
    store: Any = False
    keep_alive: Any = None


class FrontApp(App):
    def __init__(
        self, models: FrontModels, settings: AppSettings, kserve: KServe, forwarder: Forwarder, quotas: QuotaClient
    ) -> None:
        def own(endpoint: ASGIApp, name: Callable[[str], str] = str, *, resumable: bool = False) -> ASGIApp:
            return _Own(endpoint, lambda body: _is_served(body, models, name, resumable), settings, forwarder, quotas)

        def ollama(given: str) -> str:
            return model_name(given, models.serves)

        dataplane, resumable = models.dataplane, settings.resumable_streams > 0
        endpoints = {
            "/v1/chat/completions": own(ChatCompletions(dataplane, settings), resumable=resumable),
            "/v1/completions": own(Completions(dataplane, settings), resumable=resumable),
            "/v1/messages": own(Messages(dataplane, settings)),
            "/v1/messages/count_tokens": own(CountTokens(dataplane, settings)),
            "/api/chat": own(Chat(dataplane, settings), ollama),
            "/api/generate": own(Generate(dataplane, settings), ollama),
            "/tokenize": own(Tokenize(dataplane, settings)),
            "/detokenize": own(Detokenize(dataplane, settings)),
        }
        routes = [GuardedRoute(path, each, INFER, methods=["POST"]) for path, each in endpoints.items()]
        super().__init__(routes, settings, KServeApp(kserve), _FrontDoor(settings))
        self._models = models
        self._forwarder = forwarder
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and self._may_serve(scope):
            await super().__call__(scope, receive, send)
        else:
            await self._forwarder.http(scope, receive, send)

    def _may_serve(self, scope: Scope) -> bool:
        if self.kserve is not None and self._is_kserve(self.kserve, scope["path"]):
            found = self.kserve.find(scope)
            return (
                not isinstance(found, HttpError)
                and found.route.endswith(_TENSOR_ENDPOINTS)
                and self._models.has_tensors(*found.names)
            )
        drop_trailing_slash(scope)
        return self.routes.has(scope["path"])

    async def _admit(self, exchange: Exchange, access: Access | None) -> None:
        await super()._admit(exchange, access)
        await self._quotas.count(exchange.context)


class _FrontDoor(Door):
    """What a request may use is asked for when it is certain that it is served here."""

    def begin(self, exchange: Exchange) -> None:
        exchange.load = self._load
        self._lag.check()


class _Own:
    """An endpoint, for the requests that can be served here."""

    def __init__(
        self,
        endpoint: ASGIApp,
        is_served: Callable[[bytes], bool],
        settings: AppSettings,
        forwarder: Forwarder,
        quotas: QuotaClient,
    ) -> None:
        self._endpoint = endpoint
        self._is_served = is_served
        self._journal = settings.journal
        self._limit = settings.max_body_bytes
        self._forwarder = forwarder
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        try:
            body = await exchange.body(self._limit, from_curl=True)
        except ClientGone:
            exchange.context.record.cancelled()
            return
        if not self._is_served(body):
            self._journal.leave(exchange.context)
            headers = [header for header in scope["headers"] if header[0] not in _OF_CODED_BODY]
            await self._forwarder.http({**scope, "headers": headers}, receive, exchange.raw_send, body)
            return
        await self._quotas.count(exchange.context)
        exchange.put_back(body)
        await self._endpoint(scope, receive, send)


def _is_served(body: bytes, models: FrontModels, name: Callable[[str], str], resumable: bool) -> bool:
    """Whether nothing but a model of this front is needed. So is nothing for a body that cannot be read: its error.
    `resumable`: streams outlive their connections, and their clients may come back to another front."""
    try:
        asked = decode_json(body, _Asked)
    except InvalidRequestError:
        return True
    if asked.store or (resumable and asked.stream) or asked.keep_alive is not None or not isinstance(asked.model, str):
        return False
    return models.serves(name(asked.model))
