"""Endpoints that generate: body, request, model, generation, response; and chats with models of other servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from penstock.gateway.generating.request_reading import JsonBody, RequestReader, default_model
from penstock.gateway.models.entries import Kind, Upstream, UpstreamAnswer, UpstreamChat
from penstock.gateway.models.language.dataplane import DataPlane, GenerateRequest, Generation
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams


def chat_fields(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`request` without what is None; `messages` are as chat templates know them. What the model thought in earlier
    turns is left out: some servers refuse it."""
    fields = {name: value for name, value in request.items() if value is not None}
    return fields | {"messages": [_upstream_message(message) for message in messages]}


def _upstream_message(message: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "tool_calls" in shown:
        shown["tool_calls"] = [_upstream_call(call) for call in shown["tool_calls"]]
    return shown


def _upstream_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates get arguments as an object, servers as JSON in a text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": arguments}}


class Streamable(Protocol):
    """A decoded request, of whatever protocol."""

    stream: bool | None


_R = TypeVar("_R", bound=Streamable)


class GeneratingEndpoint(ABC, Generic[_R]):
    """A protocol fills in the abstract methods. Every step of the engine resumes all coroutines
    that await a stream, so nothing but `handle` stands between the stream and the server."""

    kind: ClassVar[Kind] = Kind.CHAT
    """What its requests need of a model."""
    passes_body: ClassVar[bool] = False
    """Models of other servers are asked with the same body."""

    def __init__(self, dataplane: DataPlane, settings: AppSettings, resumable: ResumableStreams | None = None) -> None:
        """`resumable`: for streams that go on for some time after their client has left; None: they end then."""
        self._dataplane = dataplane
        self._settings = settings
        self._resumable = resumable
        passed = self.kind if self.passes_body else None
        self._reader = RequestReader(dataplane.models, self._parse, self._model_name, self._default_model, passed)

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            call.watch()
            if exchange.counts_late:
                reads = self._resumable is not None and self._resumable.is_read_by(exchange, body)
                exchange.context.count(reads=reads)
            request = await self._reader.read(exchange, body)
            if request is None:
                return
            exchange.read_deadline()
            resumable = self._resumable if request.stream else None
            if resumable is not None and await resumable.resume(exchange, body):
                return
            if await self._answer_unloaded(exchange, request):
                return
            request = await self._for_own_model(exchange, request)
            if request is None or await self._answer_at_once(exchange, request):
                return
            text_request = await self._generate_request(request, exchange.context)
            if request.stream and self._settings.heartbeat_s:
                text_request = replace(text_request, pulse=self._settings.heartbeat_s)
            if resumable is not None and resumable.has_room:
                await resumable.begin(
                    exchange,
                    body,
                    lambda context: self._dataplane.generate(replace(text_request, context=context)),
                    lambda recorder, generation: self._respond(recorder, request, text_request, generation),
                )
                return
            generation = await self._dataplane.generate(text_request)
            try:
                await self._respond(exchange, request, text_request, generation)
            finally:
                generation.close()

    async def _answer_unloaded(self, exchange: Exchange, request: _R) -> bool:
        """Answers a request for which no model is loaded. False: this one needs its model."""
        return False

    async def _for_own_model(self, exchange: Exchange, request: _R) -> _R | None:
        """The request, whose model is found from now on. None when another server has answered it. Raises
        PenstockError."""
        await self._dataplane.models.find(self._model_name(request), self.kind, exchange.context)
        return request

    def _default_model(self, context: RequestContext) -> str:
        return default_model(self._settings, context, self._dataplane.models, self.kind)

    async def _answer_at_once(self, exchange: Exchange, request: _R) -> bool:
        """Answers a request that needs no generation. False: this one does."""
        return False

    @abstractmethod
    def _parse(self, body: JsonBody) -> _R:
        """Raises InvalidRequestError, UnsupportedError."""

    @abstractmethod
    def _model_name(self, request: _R) -> str:
        """The name of the request's model, as this server knows it."""

    @abstractmethod
    async def _generate_request(self, request: _R, context: RequestContext) -> GenerateRequest:
        """What the data plane is asked to generate. Raises PenstockError."""

    @abstractmethod
    def _respond(
        self, exchange: Exchange, request: _R, text_request: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        """The whole response, streamed or not."""


class TranslatingEndpoint(GeneratingEndpoint[_R]):
    """Other servers get its requests as OpenAI's chats."""

    async def _for_own_model(self, exchange: Exchange, request: _R) -> _R | None:
        entry = await self._dataplane.models.find(self._model_name(request), self.kind, exchange.context)
        if entry.upstream is None:
            return request
        name = await self._answered_upstream(exchange, request, entry.upstream)
        return None if name is None else await self._for_own_model(exchange, self._renamed(request, name))

    async def _answered_upstream(self, exchange: Exchange, request: _R, model: Upstream) -> str | None:
        """None when that is done; else the model of this server that is to answer. Raises PenstockError."""
        if await self._answered_without_text(exchange, request):
            return None
        chat = await self._upstream_chat(request, exchange.context)
        pulse = self._settings.heartbeat_s if request.stream else None
        async with model.chat(exchange, chat, pulse=pulse or None) as answer:
            if isinstance(answer, str):
                return answer
            await self._respond_from(exchange, request, answer)
        return None

    async def _answered_without_text(self, exchange: Exchange, request: _R) -> bool:
        """True if the request has its answer: some need nothing from the other server. Raises PenstockError."""
        return False

    @abstractmethod
    async def _upstream_chat(self, request: _R, context: RequestContext) -> UpstreamChat:
        """The request for a model of another server. Raises PenstockError."""

    @abstractmethod
    def _renamed(self, request: _R, model: str) -> _R:
        """For another model."""

    @abstractmethod
    def _respond_from(self, exchange: Exchange, request: _R, answer: UpstreamAnswer) -> Awaitable[None]:
        """The whole response, streamed or not, of another server's answer."""
