"""Questions to a server before a run."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.framing import MalformedError, ParsedAnswer
from penstock.loadtest.clients.http1 import ConnectionLostError, ConnectionPool
from penstock.loadtest.clients.request_head import head
from penstock.loadtest.clients.settings import client_options
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

_TIMEOUT = 30.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def get(target: Target, path: str) -> ParsedAnswer:
    """Raises LoadTestError when there is no answer."""
    return await ask(client_options(target), path)


async def ask(options: ClientOptions, path: str) -> ParsedAnswer:
    """GET. Raises LoadTestError when there is no answer."""
    pool = ConnectionPool(options.url, keep_alive=False, verify_tls=options.verify_tls)
    request = head(pool, options, "GET", path) + b"\r\n\r\n"
    try:
        async with asyncio.timeout(min(options.timeout, _TIMEOUT)):
            answer = (await pool.exchange(request)).parse()
    except (OSError, ConnectionLostError, MalformedError) as error:
        raise LoadTestError(f"no answer from {options.url}: {error or type(error).__name__}") from None
    if answer is None:
        raise LoadTestError(f"{options.url} does not speak HTTP/1.1")
    return answer


async def only_model(target: Target) -> str:
    """The first model of the server. Raises LoadTestError when it has none."""
    answer = await get(target, "/v1/models")
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data if answer.status == 200 else []
    except msgspec.MsgspecError:
        models = []
    if not models:
        raise LoadTestError(f"{target.url}/v1/models names no model (status {answer.status}): give one with --model")
    return models[0].id
