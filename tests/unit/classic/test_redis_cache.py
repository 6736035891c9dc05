"""The response cache in Redis, over a stand-in for the server that knows no entry."""

from __future__ import annotations

import asyncio

import pytest

from penstock.classic.caching.redis_cache import RedisCache

_REPLIES = {b"GET": b"$-1\r\n"}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.readline():
        words = []
        for _ in range(int(head[1:])):
            size = int((await reader.readline())[1:])
            words.append((await reader.readexactly(size + 2))[:-2])
        writer.write(_REPLIES.get(words[0].upper(), b"+OK\r\n"))
    writer.close()


async def test_lookups_wait_for_a_free_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with await asyncio.start_server(_serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        cache = RedisCache({"host": "127.0.0.1", "port": port, "max_connections": 1, "protocol": 2})
        found = await asyncio.gather(*(cache.lookup(bytes([n])) for n in range(8)))
        await cache.close()
    assert found == [None] * 8
    assert "does not answer" not in caplog.text
