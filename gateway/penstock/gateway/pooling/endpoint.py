"""The way of a call: body, request, answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.default_model import default_model, no_model, with_model
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.pooling.schemas import UNSUPPORTED, PoolingRequest

MAX_INPUTS = 2048
"""Of a call, as at OpenAI."""
_R = TypeVar("_R", bound=PoolingRequest)


def check_count(count: int, param: str) -> None:
    """Raises InvalidRequestError."""
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError(f"{param}: 1 to {MAX_INPUTS} texts are allowed, not {count}.", param=param)


class PoolingEndpoint(ABC, Generic[_R]):
    schema: ClassVar[type[PoolingRequest]]
    unsupported: ClassVar[Mapping[str, tuple[str, ...]]] = UNSUPPORTED
    needs: ClassVar[Sequence[str]] = ()
    """Capabilities that answer, the best first; empty: all do. A request without a model gets the only one that has
    one."""
    text_api: ClassVar[str | None] = None
    """By which models of other servers are asked with the same body; None: they are not."""

    def __init__(self, plane: PoolingPlane, settings: AppSettings) -> None:
        self.plane = plane
        self._settings = settings

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            call.watch()
            request = await self._own_request(exchange, body)
            if request is None:
                return
            exchange.read_deadline()
            await exchange.respond(200, await self.answer(request, exchange.context))  # type: ignore[arg-type]

    async def _own_request(self, exchange: Exchange, body: bytes) -> PoolingRequest | None:
        """The request for a model of this server; None when another server has answered it. Raises PenstockError."""
        own_body = await self._settings.text_models.answer(exchange, self.text_api, body)
        if own_body is None:
            return None
        try:
            request = parse(own_body, self.schema, self.unsupported)
            if not request.model:
                raise no_model()
        except InvalidRequestError as error:
            context = exchange.context
            named = with_model(own_body, error, context, lambda: self._default_model(context))
            return await self._own_request(exchange, named)
        return request

    def _default_model(self, context: RequestContext) -> str:
        return default_model(self._settings, context, self.plane.names_with(self.needs), self.text_api or "")

    @abstractmethod
    async def answer(self, request: _R, context: RequestContext) -> bytes:
        """Raises PenstockError."""
