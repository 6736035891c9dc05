"""An endpoint of an API that shows answers in a form of its own, those of other servers' models, too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from typing import TypeVar, cast

from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.endpoint import GeneratingEndpoint, Streamable
from penstock.gateway.generating.other_chats import OtherAnswer, OtherChat, OtherModel
from penstock.gateway.http.exchange import Exchange

_R = TypeVar("_R", bound=Streamable)


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
