"""What one attempt says about a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.engines.errors import AuthenticationError
from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.models.upstream.attempts import OpenAnswer, Question, attempt
from penstock.gateway.models.upstream.failures import AttemptFailed, Redactor
from penstock.gateway.models.upstream.server import UpstreamServer

QUESTION = Question("m", "chat/completions", [], b"{}", streams=True, seconds=30.0, redact=Redactor(()))
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: "
BUSY = b"HTTP/1.1 429 Later\r\nretry-after: 3600\r\ncontent-length: 0\r\n\r\n"
REFUSED = b"HTTP/1.1 401 Who\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def answering(answer: bytes, go: asyncio.Event | None = None) -> AsyncIterator[UpstreamServer]:
    """A server that answers everything so, as soon as it may."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if go is not None:
            await go.wait()
        writer.write(answer)
        await writer.drain()
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    settings = UpstreamSettings(name="m", url=f"http://127.0.0.1:{port}", eject_after=1, eject_seconds=0.001)
    server = UpstreamServer(settings, settings.urls[0], None)
    try:
        yield server
    finally:
        server.pool.close()
        listening.close()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_trial_is_one_request_at_a_time() -> None:
    go = asyncio.Event()
    async with answering(STREAM, go) as server:
        server.health.failed(now() - 1)
        assert server.takes_requests(now())
        trying = asyncio.create_task(attempt(server, QUESTION))
        await asyncio.sleep(0)
        assert not server.takes_requests(now())
        go.set()
        answer = await trying
        assert server.takes_requests(now())
        assert server.health.healthy
        answer.end("cancelled")
        assert server.in_flight == 0


async def test_a_trial_that_is_given_up_leaves_room_for_the_next() -> None:
    async with answering(STREAM, asyncio.Event()) as server:
        server.health.failed(now() - 1)
        trying = asyncio.create_task(attempt(server, QUESTION))
        await asyncio.sleep(0)
        trying.cancel()
        await asyncio.wait([trying])
        assert server.takes_requests(now())
        assert server.in_flight == 0


@pytest.mark.parametrize(("well", "takes"), [(False, False), (None, True), (True, True)])
async def test_only_an_answer_that_breaks_counts_against_the_server(well: bool | None, takes: bool) -> None:
    async with answering(STREAM) as server:
        answer: OpenAnswer = await attempt(server, QUESTION)
        before = now()
        answer.end("some_code", well=well)
        assert server.takes_requests(before) == takes


@pytest.mark.parametrize("own_key", [True, False])
async def test_a_key_that_has_asked_too_often_is_one_client_s_where_clients_have_their_own(own_key: bool) -> None:
    async with answering(BUSY) as server:
        with pytest.raises(AttemptFailed):
            await attempt(server, replace(QUESTION, own_key=own_key))
        assert server.takes_requests(now()) is not own_key
        assert server.takes_requests(now() + 61)  # never longer than a minute


async def test_a_client_s_own_key_that_is_refused_is_the_client_s_error() -> None:
    async with answering(REFUSED) as server:
        with pytest.raises(AttemptFailed) as caught:
            await attempt(server, replace(QUESTION, own_key=False))
        assert isinstance(caught.value.error, AuthenticationError)
        assert server.health.healthy
