"""Calls an endpoint of the KServe front without its routes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from penstock.engines.errors import PenstockError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.errors import kserve_error_body, kserve_status
from penstock.gateway.apis.kserve.logs import LogSettings
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.requests.call import DrainState
from penstock.gateway.transports.http.exchange import Exchange
from protocol.asgi_client import AsgiCall

Endpoint = Callable[[Exchange], Awaitable[None]]


def kserve(models: ModelStore, **settings: Any) -> KServe:
    defaults: dict[str, Any] = {
        "names": Catalogue(),
        "shared_memory": SharedMemoryRegions(True),
        "tracing": Tracing(),
        "logs": LogSettings(handlers=()),
    }
    return KServe(models=models, **(defaults | settings))


def call(
    endpoint: Endpoint,
    body: bytes | dict[str, Any] = b"",
    headers: dict[str, str] | None = None,
    drain: DrainState | None = None,
) -> AsgiCall:
    """A call that is to be `run()`; errors that the endpoint raises are answered as the front answers them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, drain or DrainState())
        try:
            await endpoint(exchange)
        except PenstockError as error:
            await exchange.respond(kserve_status(error), kserve_error_body(error))

    return AsgiCall(app, "/", body, headers=headers)


async def answer(endpoint: Endpoint, body: bytes | dict[str, Any] = b"", **options: Any) -> tuple[int, Any]:
    """Status and decoded body (None when it is empty)."""
    done = await call(endpoint, body, **options).run()
    text = b"".join(done.bodies)
    return done.status, json.loads(text) if text else None
