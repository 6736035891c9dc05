"""Endpoints that generate: body, request, generation, response; and chats with models that other servers have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import msgspec

from penstock.gateway.generating.request_reading import RequestReader, language_model
from penstock.gateway.models.language.dataplane import ChoiceDelta, DataPlane, GenerateRequest, Generation, Usage
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams


@dataclass(frozen=True, slots=True)
class OtherChat:
    """A chat request for another server."""

    fields: Mapping[str, Any]
    """Of OpenAI's chat API, without model and stream."""
    show_reasoning: bool = True


class OtherAnswer(Protocol):
    """Iterated as a Generation with one choice. The usage is complete with the delta that has the finish reason."""

    usage: Usage

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]: ...

    async def __anext__(self) -> list[ChoiceDelta]: ...


class OtherModel(Protocol):
    def chat(
        self, exchange: Exchange, chat: OtherChat, *, pulse: float | None
    ) -> AbstractAsyncContextManager[OtherAnswer | str]:
        """Gives the answer once it has begun, or the name of the model of this server that is to answer instead.
        `pulse`: seconds without anything to show after which the answer has an empty list. Raises PenstockError."""
        ...


def chat_fields(given: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`given` without what is None; `messages` are as chat templates know them. What the model thought in earlier turns
    is left out: some servers refuse it."""
    fields = {name: value for name, value in given.items() if value is not None}
    return fields | {"messages": [_message(each) for each in messages]}


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in given.items() if name != "reasoning_content"}
    if "tool_calls" in shown:
        shown["tool_calls"] = [_call(each) for each in shown["tool_calls"]]
    return shown


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Templates get arguments as an object, servers as JSON in a text."""
    function = given["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {**given, "function": {**function, "arguments": arguments}}


class Streamable(Protocol):
    """A decoded request, of whatever protocol."""

    stream: bool | None


_R = TypeVar("_R", bound=Streamable)


class GeneratingEndpoint(ABC, Generic[_R]):
    """A protocol fills in the abstract methods. Every step of the engine resumes all coroutines
    that await a stream, so nothing but `handle` stands between the stream and the server."""

    text_api: ClassVar[str | None] = None
    """The API by which models of other servers are asked with the same body; None: they cannot be."""

    def __init__(self, dataplane: DataPlane, settings: AppSettings, resumable: ResumableStreams | None = None) -> None:
        """`resumable`: for streams that go on for some time after their client has left; None: they end then."""
        self._dataplane = dataplane
        self._settings = settings
        self._resumable = resumable
        self._reader = RequestReader(settings, self._parse, self._model_name, self._default_model, self.text_api)

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            call.watch()
            if exchange.counts_late:
                reads = self._resumable is not None and self._resumable.is_read_by(exchange, body)
                exchange.context.count(reads=reads)
            given = await self._reader.read(exchange, body)
            request = None if given is None else await self._for_own_model(exchange, given)
            if request is None:
                return
            exchange.read_deadline()
            resumable = self._resumable if request.stream else None
            if resumable is not None and await resumable.resume(exchange, body):
                return
            await self._dataplane.models.load_on_demand(self._model_name(request), exchange.context)
            if await self._answer_at_once(exchange, request):
                return
            wanted = await self._generate_request(request, exchange.context)
            if request.stream and self._settings.heartbeat_s:
                wanted = replace(wanted, pulse=self._settings.heartbeat_s)
            if resumable is not None and resumable.has_room:
                await resumable.begin(
                    exchange,
                    body,
                    lambda context: self._dataplane.generate(replace(wanted, context=context)),
                    lambda recorder, generation: self._respond(recorder, request, wanted, generation),
                )
                return
            generation = await self._dataplane.generate(wanted)
            try:
                await self._respond(exchange, request, wanted, generation)
            finally:
                generation.close()

    async def _for_own_model(self, exchange: Exchange, request: _R) -> _R | None:
        """The request for a model of this server; None when another server has answered it. Raises PenstockError."""
        return request

    def _default_model(self, context: RequestContext) -> str:
        return language_model(self._settings, context, self._dataplane.models, self.text_api)

    async def _answer_at_once(self, exchange: Exchange, request: _R) -> bool:
        """Answers a request that needs no generation. False: this one does."""
        return False

    @abstractmethod
    def _parse(self, body: bytes) -> _R:
        """Raises InvalidRequestError, UnsupportedError."""

    @abstractmethod
    def _model_name(self, request: _R) -> str:
        """The name of the request's model, as this server knows it."""

    @abstractmethod
    async def _generate_request(self, request: _R, context: RequestContext) -> GenerateRequest:
        """What the data plane is asked to generate. Raises PenstockError."""

    @abstractmethod
    def _respond(
        self, exchange: Exchange, request: _R, wanted: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        """The whole response, streamed or not."""


class TranslatingEndpoint(GeneratingEndpoint[_R]):
    async def _for_own_model(self, exchange: Exchange, request: _R) -> _R | None:
        model = self._settings.text_models.find(self._model_name(request), exchange.context, "chat")
        if model is None:
            return request
        name = await self._answered_elsewhere(exchange, request, cast("OtherModel", model))
        return None if name is None else self._renamed(request, name)

    async def _answered_elsewhere(self, exchange: Exchange, request: _R, model: OtherModel) -> str | None:
        """None when that is done; else the model of this server that is to answer. Raises PenstockError."""
        exchange.context.principal.require_model(self._model_name(request))
        if await self._answered_without_text(exchange, request):
            return None
        chat = await self._other_chat(request, exchange.context)
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
    async def _other_chat(self, request: _R, context: RequestContext) -> OtherChat:
        """The request for a model of another server. Raises PenstockError."""

    @abstractmethod
    def _renamed(self, request: _R, model: str) -> _R:
        """For another model."""

    @abstractmethod
    def _respond_from(self, exchange: Exchange, request: _R, answer: OtherAnswer) -> Awaitable[None]:
        """The whole response, streamed or not, of another server's answer."""
