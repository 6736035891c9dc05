"""What a server is asked before a run."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from penstock.loadtest.clients.discover import get, only_model
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target
from unit.loadtest.clients.wires import RawServer, raw_server, whole


def target_of(server: RawServer, protocol: str = "openai-chat") -> Target:
    return msgspec.convert({"url": server.url, "protocol": protocol, "header": ["X-Key: k"]}, Target)


def models(*names: str) -> bytes:
    return whole(msgspec.json.encode({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}))


async def test_the_only_model_of_the_openai_api() -> None:
    async with raw_server(models("one")) as server:
        assert await only_model(target_of(server)) == "one"
    assert server.requests[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    for line in (b"\r\nX-Key: k\r\n", b"\r\nConnection: close\r\n"):
        assert line in server.requests[0]


async def test_the_only_model_of_a_repository() -> None:
    index = [{"name": "a", "version": "1", "state": "UNAVAILABLE"}, {"name": "b", "state": "READY"}, {"name": "c"}]
    async with raw_server(whole(msgspec.json.encode(index))) as server:
        assert await only_model(target_of(server, "kserve-http")) == "b"
    assert server.requests[0].startswith(b"POST /v2/repository/index HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (models(), "no model"),
        (models("one", "two"), "one, two"),
        (whole(b"{}"), "no model"),
        (whole(b'{"data":[{"id":"\xff"}]}'), "no model"),
        (whole(b'{"new":' + b"[" * 100_000), "no model"),
        (whole(b"not found", status="404 Not Found"), "status 404"),
        (b"SSH-2.0\r\n", "no answer"),
    ],
)
async def test_no_model_or_several(reply: bytes, told: str) -> None:
    async with raw_server(reply) as server:
        with pytest.raises(LoadTestError, match=told):
            await only_model(target_of(server))


async def test_the_address_that_was_asked_is_told() -> None:
    async with raw_server(models()) as server:
        with pytest.raises(LoadTestError, match=rf"{server.url}/v1/models names no model"):
            await only_model(msgspec.structs.replace(target_of(server), url=server.url + "/v1"))


async def test_nobody_is_asked_over_grpc() -> None:
    with pytest.raises(LoadTestError, match="--model"):
        await only_model(Target(url="h:1", protocol="kserve-grpc"))


async def test_a_server_that_says_nothing() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(silence) as server:
        with pytest.raises(LoadTestError, match="no answer"):
            await get(msgspec.structs.replace(target_of(server), request_timeout=0.05), "/metrics")
