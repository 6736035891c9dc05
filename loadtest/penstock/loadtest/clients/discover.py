"""Questions to a server before a run."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import ConnectionLostError, ConnectionPool, head
from penstock.loadtest.clients.response import HttpResponse, MalformedError
from penstock.loadtest.clients.settings import client_options
from penstock.loadtest.errors import UNREADABLE, LoadTestError
from penstock.loadtest.options import Target

_TIMEOUT = 30.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Indexed(msgspec.Struct):
    name: str
    state: str = ""


async def get(target: Target, path: str) -> HttpResponse:
    """Raises LoadTestError when there is no answer."""
    return await ask(client_options(target), path)


async def ask(options: ClientOptions, path: str, method: str = "GET") -> HttpResponse:
    """Sends no body. Raises LoadTestError when there is no answer."""
    options = msgspec.structs.replace(options, keep_alive=False)
    pool = ConnectionPool(options.url, keep_alive=False, verify_tls=options.verify_tls)
    length = b"" if method == "GET" else b"\r\nContent-Length: 0"
    request = head(pool, options, method, path) + length + b"\r\n\r\n"
    try:
        async with asyncio.timeout(min(options.timeout, _TIMEOUT)):
            return await pool.exchange(request)
    except (OSError, ConnectionLostError, MalformedError) as error:
        raise LoadTestError(f"no answer from {options.url}: {error or type(error).__name__}") from None


async def only_model(target: Target) -> str:
    """Raises LoadTestError when the server has no model, or several, or cannot be asked."""
    if "grpc" in target.protocol:
        raise LoadTestError(
            f"model: {target.protocol} needs --model, since gRPC servers are not asked for their models"
        )
    openai = target.protocol.startswith("openai")
    path = "/v1/models" if openai else "/v2/repository/index"
    options = client_options(target)
    answer = await ask(options, path, "GET" if openai else "POST")
    names: list[str] = []
    if answer.status == 200:
        try:
            names = _models(answer.body) if openai else _ready(answer.body)
        except UNREADABLE:
            names = []
    if len(names) != 1:
        answered = f"names {', '.join(names)}" if names else f"names no model (status {answer.status})"
        raise LoadTestError(f"model: {options.url}{path} {answered}: choose one with --model")
    return names[0]


def _models(body: bytes) -> list[str]:
    return [model.id for model in msgspec.json.decode(body, type=_Models).data]


def _ready(body: bytes) -> list[str]:
    return [model.name for model in msgspec.json.decode(body, type=list[_Indexed]) if model.state == "READY"]
