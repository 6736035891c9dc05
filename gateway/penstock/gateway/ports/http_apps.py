"""The ASGI app: routes, the door before them, and one place where every error becomes a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engines.errors import PenstockError
from penstock.gateway.anthropic import errors as anthropic_errors
from penstock.gateway.anthropic import models as anthropic_models
from penstock.gateway.anthropic.count_tokens import CountTokens
from penstock.gateway.anthropic.messages import Messages
from penstock.gateway.batches.batch_routes import CancelBatch, CreateBatch, GetBatch, ListBatches
from penstock.gateway.batches.file_routes import CreateFile, DeleteFile, FileContent, GetFile, ListFiles
from penstock.gateway.batches.message_batches import (
    CancelMessageBatch,
    CreateMessageBatch,
    DeleteMessageBatch,
    GetMessageBatch,
    ListMessageBatches,
    MessageBatchResults,
)
from penstock.gateway.batches.service import BatchService
from penstock.gateway.database import Database
from penstock.gateway.errors import HttpError
from penstock.gateway.front.access import (
    CHANGE_MODELS,
    INFER,
    OPERATE,
    OWN_FILES,
    PROBE,
    SEE_METADATA,
    SEE_METRICS,
    Access,
)
from penstock.gateway.front.server_health import ServerHealth
from penstock.gateway.http.door import CrossOrigin, Door
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.http_routes import KServeApp
from penstock.gateway.llm.adapter_control import AdapterControl
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.ollama import errors as ollama_errors
from penstock.gateway.ollama import models as ollama_models
from penstock.gateway.ollama.embed import Embed, OldEmbed
from penstock.gateway.ollama.generate import Chat, Generate
from penstock.gateway.ollama.library import OperatorsOnly, Pull
from penstock.gateway.openai.adapters import LoadAdapter, UnloadAdapter
from penstock.gateway.openai.chat import ChatCompletions
from penstock.gateway.openai.completions import Completions
from penstock.gateway.openai.engine_control import IsSleeping, ResetPrefixCache, Sleep, WakeUp
from penstock.gateway.openai.models import LoadModel, ModelDetail, ModelList, ModelObjects, UnloadModel
from penstock.gateway.openai.tokenize import Detokenize, Tokenize, TokenizerInfo
from penstock.gateway.pooling import cohere
from penstock.gateway.pooling.classify import Classify
from penstock.gateway.pooling.cohere import CohereEmbed
from penstock.gateway.pooling.embeddings import Embeddings
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.pooling.pooling import Pooling
from penstock.gateway.pooling.rerank import Rerank
from penstock.gateway.pooling.score import Score
from penstock.gateway.pooling.tei import TeiEmbed
from penstock.gateway.ports.about import about_route
from penstock.gateway.ports.health import Live, Metrics, Ready, Version
from penstock.gateway.ports.openapi import OpenApi
from penstock.gateway.ports.request_paths import drop_trailing_slash
from penstock.gateway.ports.routes import GuardedRoute, Routes
from penstock.gateway.ports.server_info import ServerInfo
from penstock.gateway.responses.chat_routes import ChatMessages, DeleteChat, GetChat, ListChats, UpdateChat
from penstock.gateway.responses.chat_store import ChatStore
from penstock.gateway.responses.conversation_routes import (
    CreateConversation,
    CreateItems,
    DeleteConversation,
    DeleteItem,
    GetConversation,
    GetItem,
    ListItems,
    UpdateConversation,
)
from penstock.gateway.responses.create import CreateResponse
from penstock.gateway.responses.input_tokens import InputTokens
from penstock.gateway.responses.response_routes import CancelResponse, DeleteResponse, GetResponse, InputItems
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.traffic.routes import DeleteTraffic, GetTraffic, ListTraffic, PutTraffic
from penstock.gateway.traffic.table import TrafficTable
from penstock.gateway.usage.ledger import UsageLedger
from penstock.gateway.usage.routes import Usage

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
) -> App:
    """The public port: the OpenAI API, the Anthropic API, and KServe v2 below /v2, behind the same keys."""
    adapters = AdapterControl(dataplane)
    pooling = pooling or PoolingPlane(dataplane)
    responses = responses or ResponseService(Database(None), settings)
    resumable = _resumable_streams(settings)
    routes = [
        *_chat_routes(ChatCompletions(dataplane, settings, responses.chats, resumable), responses.chats),
        GuardedRoute("/v1/completions", Completions(dataplane, settings, resumable), INFER, methods=["POST"]),
        *_response_routes(dataplane, settings, responses),
        GuardedRoute("/v1/messages", Messages(dataplane, settings), INFER, methods=["POST"]),
        GuardedRoute("/v1/messages/count_tokens", CountTokens(dataplane, settings), INFER, methods=["POST"]),
        *_pooling_routes(pooling, settings),
        *_batch_routes(batches),
        *_message_batch_routes(batches, settings),
        *_ollama_routes(dataplane, pooling, settings),
        *_traffic_routes(TrafficTable() if traffic is None else traffic),
        *_usage_routes(ledger),
        *_model_routes(dataplane, pooling, settings, kserve),
        GuardedRoute("/v1/load_lora_adapter", LoadAdapter(adapters, settings), CHANGE_MODELS, methods=["POST"]),
        GuardedRoute("/v1/unload_lora_adapter", UnloadAdapter(adapters, settings), CHANGE_MODELS, methods=["POST"]),
        GuardedRoute("/sleep", Sleep(dataplane), CHANGE_MODELS, methods=["POST"]),
        GuardedRoute("/wake_up", WakeUp(dataplane), CHANGE_MODELS, methods=["POST"]),
        GuardedRoute("/is_sleeping", IsSleeping(dataplane), SEE_METADATA, methods=["GET"]),
        GuardedRoute("/reset_prefix_cache", ResetPrefixCache(dataplane), CHANGE_MODELS, methods=["POST"]),
        GuardedRoute("/tokenize", Tokenize(dataplane, settings), INFER, methods=["POST"]),
        GuardedRoute("/detokenize", Detokenize(dataplane, settings), INFER, methods=["POST"]),
        GuardedRoute("/tokenizer_info", TokenizerInfo(dataplane, settings), SEE_METADATA, methods=["GET"]),
        *_health_routes(dataplane, settings),
        GuardedRoute("/ping", Ready(_health(dataplane, settings), settings.drain), PROBE, methods=["GET", "POST"]),
        GuardedRoute("/version", Version(dataplane, pooling, settings), SEE_METADATA, methods=["GET"]),
        GuardedRoute("/server_info", ServerInfo(dataplane, settings), SEE_METADATA, methods=["GET"]),
    ]
    kserve_app = KServeApp(kserve) if kserve is not None else None
    kserve_paths = {} if kserve_app is None else kserve_app.paths()
    routes.append(GuardedRoute("/openapi.json", OpenApi(settings, routes, kserve_paths), SEE_METADATA, methods=["GET"]))
    routes.append(about_route(settings, routes, kserve=kserve is not None))
    door = Door(settings, resumable.may_be_read_by) if resumable is not None else None
    return App(routes, settings, kserve_app, door)


def _resumable_streams(settings: AppSettings) -> ResumableStreams | None:
    """Loaded only where it is asked for."""
    if not settings.resumable_streams:
        return None
    from penstock.gateway.generating.resumable_streams import ResumableStreams

    return ResumableStreams(settings, settings.resumable_streams)


def batch_endpoints(dataplane: DataPlane, settings: AppSettings, pooling: PoolingPlane) -> dict[str, ASGIApp]:
    """What lines of batches may ask, by path. Their responses are in a file: they are not kept beside it."""
    return {
        "/v1/chat/completions": ChatCompletions(dataplane, settings),
        "/v1/completions": Completions(dataplane, settings),
        "/v1/responses": CreateResponse(dataplane, settings, _keeping_nothing(settings)),
        "/v1/messages": Messages(dataplane, settings),
        **_pooling_endpoints(pooling, settings),
    }


def _keeping_nothing(settings: AppSettings) -> ResponseService:
    return ResponseService(Database(None), replace(settings, stored_responses=0))


def _batch_routes(batches: BatchService | None) -> list[GuardedRoute]:
    file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
    return [
        GuardedRoute("/v1/files", CreateFile(batches), OWN_FILES, methods=["POST"]),
        GuardedRoute("/v1/files", ListFiles(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute(file, GetFile(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute(file, DeleteFile(batches), OWN_FILES, methods=["DELETE"]),
        GuardedRoute(f"{file}/content", FileContent(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute("/v1/batches", CreateBatch(batches), INFER, methods=["POST"]),
        GuardedRoute("/v1/batches", ListBatches(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute(batch, GetBatch(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute(f"{batch}/cancel", CancelBatch(batches), OWN_FILES, methods=["POST"]),
    ]


def _message_batch_routes(batches: BatchService | None, settings: AppSettings) -> list[GuardedRoute]:
    every, one = "/v1/messages/batches", "/v1/messages/batches/{batch_id}"
    return [
        GuardedRoute(every, CreateMessageBatch(batches, settings), INFER, methods=["POST"]),
        GuardedRoute(every, ListMessageBatches(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute(one, GetMessageBatch(batches), OWN_FILES, methods=["GET"]),
        GuardedRoute(one, DeleteMessageBatch(batches), OWN_FILES, methods=["DELETE"]),
        GuardedRoute(f"{one}/cancel", CancelMessageBatch(batches), OWN_FILES, methods=["POST"]),
        GuardedRoute(f"{one}/results", MessageBatchResults(batches), OWN_FILES, methods=["GET"]),
    ]


def _ollama_routes(dataplane: DataPlane, pooling: PoolingPlane, settings: AppSettings) -> list[GuardedRoute]:
    models = ollama_models.Models(dataplane, pooling, settings.text_models)
    return [
        GuardedRoute("/api/chat", Chat(dataplane, settings), INFER, methods=["POST"]),
        GuardedRoute("/api/generate", Generate(dataplane, settings), INFER, methods=["POST"]),
        GuardedRoute("/api/embed", Embed(pooling, settings), INFER, methods=["POST"]),
        GuardedRoute("/api/embeddings", OldEmbed(pooling, settings), INFER, methods=["POST"]),
        GuardedRoute("/api/tags", ollama_models.Tags(models), SEE_METADATA, methods=["GET"]),
        GuardedRoute("/api/ps", ollama_models.Running(models), SEE_METADATA, methods=["GET"]),
        GuardedRoute("/api/show", ollama_models.Show(models, settings), SEE_METADATA, methods=["POST"]),
        GuardedRoute("/api/version", ollama_models.OllamaVersion(settings), SEE_METADATA, methods=["GET"]),
        GuardedRoute("/api/pull", Pull(models, settings), SEE_METADATA, methods=["POST"]),
        *(
            GuardedRoute(f"/api/{name}", OperatorsOnly(), SEE_METADATA, methods=[method])
            for name, method in (("create", "POST"), ("copy", "POST"), ("push", "POST"), ("delete", "DELETE"))
        ),
    ]


def _traffic_routes(table: TrafficTable) -> list[GuardedRoute]:
    one = "/traffic/{name:path}"
    return [
        GuardedRoute("/traffic", ListTraffic(table), OPERATE, methods=["GET"]),
        GuardedRoute(one, GetTraffic(table), OPERATE, methods=["GET"]),
        GuardedRoute(one, PutTraffic(table), CHANGE_MODELS, methods=["PUT"]),
        GuardedRoute(one, DeleteTraffic(table), CHANGE_MODELS, methods=["DELETE"]),
    ]


def _usage_routes(ledger: UsageLedger | None) -> list[GuardedRoute]:
    return [] if ledger is None else [GuardedRoute("/usage", Usage(ledger), OPERATE, methods=["GET"])]


def _model_routes(
    dataplane: DataPlane, pooling: PoolingPlane, settings: AppSettings, kserve: KServe | None
) -> list[GuardedRoute]:
    objects = ModelObjects(dataplane, pooling, settings.text_models)
    every = anthropic_models.ModelPage(objects, ModelList(objects))
    one = anthropic_models.ModelDetail(objects, ModelDetail(objects))
    routes = [
        GuardedRoute("/v1/models", every, SEE_METADATA, methods=["GET"]),
        GuardedRoute("/v1/models/{name:path}", one, SEE_METADATA, methods=["GET"]),
    ]
    if kserve is not None:
        load, unload = LoadModel(kserve.models, objects), UnloadModel(kserve.models)
        routes += [
            GuardedRoute("/v1/models/{name:path}/load", load, CHANGE_MODELS, methods=["POST"]),
            GuardedRoute("/v1/models/{name:path}/unload", unload, CHANGE_MODELS, methods=["POST"]),
        ]
    return routes


def _pooling_endpoints(pooling: PoolingPlane, settings: AppSettings) -> dict[str, ASGIApp]:
    """Several have the paths of more than one other server."""
    rerank, score, classify = Rerank(pooling, settings), Score(pooling, settings), Classify(pooling, settings)
    return {
        "/v1/embeddings": Embeddings(pooling, settings),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        **dict.fromkeys(("/score", "/v1/score"), score),
        **dict.fromkeys(("/classify", "/v1/classify"), classify),
        "/pooling": Pooling(pooling, settings),
        "/embed": TeiEmbed(pooling, settings),
        "/v1/embed": CohereEmbed(pooling, settings, 1),
        "/v2/embed": CohereEmbed(pooling, settings, 2),
    }


def _pooling_routes(pooling: PoolingPlane, settings: AppSettings) -> list[GuardedRoute]:
    endpoints = _pooling_endpoints(pooling, settings)
    return [GuardedRoute(path, endpoint, INFER, methods=["POST"]) for path, endpoint in endpoints.items()]


def build_metrics_app(
    dataplane: DataPlane, settings: AppSettings, extra_routes: Sequence[GuardedRoute] = ()
) -> ASGIApp:
    """The metrics port: metrics and health."""
    routes = [*_health_routes(dataplane, settings), *extra_routes]
    return App([*routes, about_route(settings, routes)], settings)


def _chat_routes(completions: ChatCompletions, chats: ChatStore) -> list[GuardedRoute]:
    every, one = "/v1/chat/completions", "/v1/chat/completions/{completion_id}"
    return [
        GuardedRoute(every, completions, INFER, methods=["POST"]),
        GuardedRoute(every, ListChats(chats), INFER, methods=["GET"]),
        GuardedRoute(one, GetChat(chats), INFER, methods=["GET"]),
        GuardedRoute(one, UpdateChat(chats), INFER, methods=["POST"]),
        GuardedRoute(one, DeleteChat(chats), INFER, methods=["DELETE"]),
        GuardedRoute(f"{one}/messages", ChatMessages(chats), INFER, methods=["GET"]),
    ]


def _response_routes(dataplane: DataPlane, settings: AppSettings, responses: ResponseService) -> list[GuardedRoute]:
    one, conversations = "/v1/responses/{response_id}", "/v1/conversations"
    conversation = f"{conversations}/{{conversation_id}}"
    items, item = f"{conversation}/items", f"{conversation}/items/{{item_id}}"
    return [
        GuardedRoute("/v1/responses", CreateResponse(dataplane, settings, responses), INFER, methods=["POST"]),
        GuardedRoute(
            "/v1/responses/input_tokens", InputTokens(dataplane, settings, responses), INFER, methods=["POST"]
        ),
        GuardedRoute(one, GetResponse(responses, settings), INFER, methods=["GET"]),
        GuardedRoute(one, DeleteResponse(responses), INFER, methods=["DELETE"]),
        GuardedRoute(f"{one}/cancel", CancelResponse(responses), INFER, methods=["POST"]),
        GuardedRoute(f"{one}/input_items", InputItems(responses), INFER, methods=["GET"]),
        GuardedRoute(conversations, CreateConversation(responses, settings), INFER, methods=["POST"]),
        GuardedRoute(conversation, GetConversation(responses, settings), INFER, methods=["GET"]),
        GuardedRoute(conversation, UpdateConversation(responses, settings), INFER, methods=["POST"]),
        GuardedRoute(conversation, DeleteConversation(responses, settings), INFER, methods=["DELETE"]),
        GuardedRoute(items, CreateItems(responses, settings), INFER, methods=["POST"]),
        GuardedRoute(items, ListItems(responses, settings), INFER, methods=["GET"]),
        GuardedRoute(item, GetItem(responses, settings), INFER, methods=["GET"]),
        GuardedRoute(item, DeleteItem(responses, settings), INFER, methods=["DELETE"]),
    ]


def _health_routes(dataplane: DataPlane, settings: AppSettings) -> list[GuardedRoute]:
    health = _health(dataplane, settings)
    return [
        GuardedRoute("/health", Live(health), PROBE, methods=["GET"]),
        GuardedRoute("/health/live", Live(health), PROBE, methods=["GET"]),
        GuardedRoute("/health/ready", Ready(health, settings.drain), PROBE, methods=["GET"]),
        GuardedRoute("/metrics", Metrics(settings), SEE_METRICS, methods=["GET"]),
        GuardedRoute("/metrics/", Metrics(settings), SEE_METRICS, methods=["GET"]),
    ]


def _health(dataplane: DataPlane, settings: AppSettings) -> ServerHealth:
    return settings.health or ServerHealth(lambda: dataplane.models.live, lambda: dataplane.models.ready)


class App:
    """Plain ASGI: a port's routes behind its door. What is compared is `scope["path"]`, which no Host header can bend.

    Routes are found without starlette's Router, whose own coroutines would lie on the way of every token.
    """

    def __init__(
        self,
        routes: Sequence[GuardedRoute],
        settings: AppSettings,
        kserve: KServeApp | None = None,
        door: Door | None = None,
    ) -> None:
        self.routes = Routes(routes)
        self.kserve = kserve
        self._drain = settings.drain
        self._bodies = settings.intake.bodies
        self._pool = settings.pools.tensors
        self._journal = settings.journal
        self._door = door or Door(settings)
        self._cross_origin = CrossOrigin(settings.browsers.origins) if settings.browsers.origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"This server has no use for ASGI scopes of type {scope['type']}.")
        kserve = self.kserve if self.kserve is not None and self._is_kserve(self.kserve, scope["path"]) else None
        if kserve is None:  # Triton knows no paths with a slash at the end
            drop_trailing_slash(scope)
        exchange = Exchange(scope, receive, send, self._drain, self._bodies, self._pool)
        if anthropic_errors.has_form(scope["path"], exchange.headers):
            exchange.error_form = anthropic_errors.ANTHROPIC_ERRORS
        elif ollama_errors.has_path(scope["path"]):
            exchange.error_form = ollama_errors.OLLAMA_ERRORS
        elif scope["path"] in cohere.PATHS:
            exchange.error_form = cohere.COHERE_ERRORS
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
            del scope[SCOPE_KEY]  # `receive` knows the scope: no request leaves a cycle

    def access(self, scope: Scope) -> Access | None:
        """Of the route that a request asks for; None where there is none."""
        if self.kserve is not None and self._is_kserve(self.kserve, scope["path"]):
            kserve_route = self.kserve.find(scope)
            return None if isinstance(kserve_route, HttpError) else kserve_route.access
        route = self.routes.find(dict(scope))
        return None if isinstance(route, HttpError) else route.access

    def _is_kserve(self, kserve: KServeApp, path: str) -> bool:
        """/v2/rerank and /v2/embed are Cohere's, and everything else below /v2 KServe's."""
        return kserve.handles(path) and not self.routes.has(path)

    async def _answer(self, exchange: Exchange, kserve: KServeApp | None) -> None:
        if self._cross_origin is not None:
            scope = exchange.scope
            methods = partial(self.routes.methods, scope["path"]) if kserve is None else partial(kserve.methods, scope)
            if await self._cross_origin.answered(exchange, methods):
                return
        if kserve is not None:
            await self._answer_kserve(kserve, exchange)
            return
        try:
            route = self.routes.find(exchange.scope)
            if isinstance(route, HttpError):
                self._door.admit(exchange, None)
                raise route
            exchange.context.record.route = route.name_in_records
            self._door.admit(exchange, route.access)
            await route.app(exchange.scope, exchange.receive, exchange.send)
        except PenstockError as error:
            await exchange.fail(error)
        except Exception as error:
            logger.exception("Unexpected error")
            await exchange.fail(error)

    async def _answer_kserve(self, kserve: KServeApp, exchange: Exchange) -> None:
        """Below /v2 errors have another shape, which that app knows."""
        route = kserve.find(exchange.scope)
        known = None if isinstance(route, HttpError) else route
        if known is not None:
            exchange.context.record.route = known.route
        try:
            await self._admit(exchange, None if known is None else known.access)
        except PenstockError as error:
            await kserve.fail(exchange, error)
        else:
            await kserve.answer(exchange, route)

    async def _admit(self, exchange: Exchange, access: Access | None) -> None:
        """To KServe. Raises PenstockError."""
        self._door.admit(exchange, access)
