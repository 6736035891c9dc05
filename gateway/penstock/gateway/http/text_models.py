"""Models that answer whole requests as text: those of other servers, and those that take text as tensors. An endpoint
looks here for the model's name before it reads the body as a request for a language model of this server."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.gateway.http.exchange import Exchange


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


class TextModels:
    """By public name."""

    def __init__(self) -> None:
        self.by_name: dict[str, TextModel] = {}

    async def answer(self, exchange: Exchange, api: str | None, body: bytes) -> bytes | None:
        """Lets one of them answer, and returns None; or returns the body, which is for a model of this server. `api`:
        by which they can be asked with this body; None: they cannot be. Raises PenstockError."""
        if api is None or not self.by_name:
            return body
        name = _model_name(body)
        model = None if name is None else self.by_name.get(name)
        return body if model is None else await model.answer(exchange, api, body)


class _Named(msgspec.Struct):
    model: str | None = None


def _model_name(body: bytes) -> str | None:
    """None if it cannot be read: the endpoint will say why."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
