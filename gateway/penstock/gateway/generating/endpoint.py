"""What every endpoint that generates does with a call: body, request, generation, response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.default_model import language_model, no_model, with_model
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane, GenerateRequest, Generation

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams


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

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            call.watch()
            if exchange.counts_late:
                reads = self._resumable is not None and self._resumable.is_read_by(exchange, body)
                exchange.context.count(reads=reads)
            request = await self._own_request(exchange, body)
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

    async def _own_request(self, exchange: Exchange, body: bytes) -> _R | None:
        """As `_for_own_model`. A request that names no model has one from here on."""
        own_body = await self._settings.text_models.answer(exchange, self.text_api, body)
        if own_body is None:
            return None
        try:
            request = self._parse(own_body)
            if not self._model_name(request):
                raise no_model()
        except InvalidRequestError as error:
            context, models = exchange.context, self._dataplane.models
            named = with_model(
                own_body, error, context, lambda: language_model(self._settings, context, models, self.text_api)
            )
            return await self._own_request(exchange, named)
        return await self._for_own_model(exchange, request)

    async def _for_own_model(self, exchange: Exchange, request: _R) -> _R | None:
        """The request for a model of this server; None when another server has answered it. Raises PenstockError."""
        return request

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
