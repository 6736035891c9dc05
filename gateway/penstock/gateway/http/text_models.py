"""Models that answer whole requests as text: those that other servers have. Endpoints ask here by the model's name
before they read a body as one for a model of this server; without such models nobody is asked."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.gateway.http.exchange import Exchange


class TextModel(Protocol):
    @property
    def apis(self) -> tuple[str, ...]:
        """What clients may ask it by."""
        ...

    @property
    def created(self) -> int:
        """Unix seconds."""
        ...

    @property
    def root(self) -> str:
        """What the other server calls it."""
        ...

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        """Answers the request, and gives None; or gives the body for the model of this server that is to do so, before
        anything has been sent. Raises PenstockError."""
        ...


class TextModels:
    """By public name."""

    def __init__(self) -> None:
        self.by_name: dict[str, TextModel] = {}

    async def answered(self, exchange: Exchange, api: str | None, body: bytes) -> bytes | None:
        """None when one of them has answered; else the body for a model of this server. `api` is the one by which such
        models can be asked with the same body; None: there is none. Raises PenstockError."""
        if api is None or not self.by_name:
            return body
        name = _model_name(body)
        model = None if name is None else self.by_name.get(name)
        return body if model is None else await model.answer(exchange, api, body)


class _Named(msgspec.Struct):
    model: str | None = None


def _model_name(body: bytes) -> str | None:
    """None where it cannot be read: the endpoint will say why."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
