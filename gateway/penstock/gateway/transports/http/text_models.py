"""Models that answer whole requests as text: those of other servers, and those that take text as tensors. An endpoint
looks here for the model's name before it reads the body as a request for a language model of this server."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange


class TextModel(Protocol):
    @property
    def apis(self) -> tuple[str, ...]:
        """By which clients may ask it: "chat", "completions" or "embeddings"."""
        ...

    @property
    def created(self) -> int:
        """Unix seconds."""
        ...

    @property
    def root(self) -> str:
        """What the other server calls it."""
        ...

    @property
    def owner(self) -> str:
        """As lists of models name it."""
        ...

    @property
    def folder(self) -> str:
        """Where its files are; "": nowhere on this machine."""
        ...

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        """Answers the request, and returns None. Where a model of this server has to answer instead, returns the body
        for it, and nothing has been sent. Raises PenstockError."""
        ...


class TextRouting(Protocol):
    """Names with traffic rules."""

    def text_model(self, name: str, context: RequestContext, api: str, body: bytes | None) -> TextModel | None:
        """The target of this request, where that is a text model. `body`: the request as `api` has it; None: it came by
        another one. Raises PenstockError."""
        ...

    def text_names(self) -> list[tuple[str, TextModel]]:
        """Those that only text models serve now, each with the first of them."""
        ...


class TextModels:
    """By name."""

    def __init__(self) -> None:
        self.by_name: dict[str, TextModel] = {}
        self.routing: TextRouting | None = None
        """None while no name has traffic rules."""

    def find(self, name: str, context: RequestContext, api: str, body: bytes | None = None) -> TextModel | None:
        """The text model that gets the request of `context`; None: it is for a model of this server. `body`: as
        TextRouting has it. Raises PenstockError."""
        routed = None if self.routing is None else self.routing.text_model(name, context, api, body)
        is_chosen = context.routed is not None and context.routed.name == name
        return routed if routed is not None or is_chosen else self.by_name.get(name)

    def listed(self) -> dict[str, TextModel]:
        """By all names that clients may know."""
        return self.by_name if self.routing is None else {**self.by_name, **dict(self.routing.text_names())}

    async def answer(self, exchange: Exchange, api: str | None, body: bytes) -> bytes | None:
        """Lets one of them answer, and returns None; or returns the body, which is for a model of this server. `api`:
        by which they can be asked with this body; None: they cannot be. Raises PenstockError."""
        if api is None or not (self.by_name or self.routing):
            return body
        name = _model_name(body)
        model = None if name is None else self.find(name, exchange.context, api, body)
        return body if model is None else await model.answer(exchange, api, body)


class _Named(msgspec.Struct):
    model: str | None = None


def _model_name(body: bytes) -> str | None:
    """None if it cannot be read: the endpoint will say why."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
