"""Questions to a server before a run."""

from __future__ import annotations

import os

import msgspec

from penstock.loadtest.clients.http1 import ConnectionLostError, ConnectionPool, ParsedAnswer
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def get(target: Target, path: str) -> ParsedAnswer:
    """Raises LoadTestError when there is no answer."""
    pool = ConnectionPool(target.url, keep_alive=False, verify_tls=target.verify_tls)
    key = target.api_key or os.environ.get("OPENAI_API_KEY")
    lines = [f"GET {pool.path}{path} HTTP/1.1", f"Host: {pool.authority}", "Connection: close", *target.header]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    try:
        answer = (await pool.exchange("\r\n".join([*lines, "", ""]).encode())).parse()
    except (OSError, ConnectionLostError) as error:
        raise LoadTestError(f"no answer from {target.url}: {error}") from None
    if answer is None:
        raise LoadTestError(f"{target.url} does not speak HTTP/1.1")
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
