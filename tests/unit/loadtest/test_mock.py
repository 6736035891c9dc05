from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.gateway import cli
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.mock.main import main
from penstock.loadtest.mock.options import MockOptions, Schedule
from penstock.loadtest.mock.server import Mock

CHAT = "/v1/chat/completions"


def test_tokens_are_due_from_the_arrival_on() -> None:
    schedule = Schedule(MockOptions(ttft_ms=50, itl_ms=10), started=0.0)
    assert [schedule.due(7.0, token) for token in (0, 1, 63)] == pytest.approx([7.05, 7.06, 7.68])


def test_pauses_move_what_falls_into_them_to_their_end() -> None:
    schedule = Schedule(MockOptions(ttft_ms=0, itl_ms=100, pause_every_ms=1000, pause_ms=300), started=5.0)
    due = [schedule.due(5.05, token) for token in range(12)]
    assert due == pytest.approx([5.05, 5.15, 5.25, 5.35, 5.45, 5.55, 5.65, 6.0, 6.0, 6.0, 6.05, 6.15])


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Mock, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with Mock(MockOptions(port=0, **{"ttft_ms": 2, "itl_ms": 1} | options)) as mock:
        reader, writer = await asyncio.open_connection("127.0.0.1", mock.port)
        yield mock, reader, writer
        writer.close()


def request(path: str, body: object = None, method: str = "POST", fields: str = "") -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def whole(reader: asyncio.StreamReader) -> tuple[int, Any]:
    raw = await head(reader)
    size = int(raw.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    return int(raw.split()[1]), json.loads(await reader.readexactly(size))


async def stream(reader: asyncio.StreamReader) -> list[Any]:
    """The events of a stream, each of which is a chunk of its own; [DONE] as a text."""
    assert b"Transfer-Encoding: chunked" in await head(reader)
    found = []
    while size := int(await reader.readline(), 16):
        data = (await reader.readexactly(size)).removeprefix(b"data: ").strip()
        found.append("DONE" if data == b"[DONE]" else json.loads(data))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return found


async def test_a_chat_is_streamed_as_the_openai_api_says() -> None:
    body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 3, "stream": True}
    async with served(text=" x") as (_, reader, writer):
        writer.write(request(CHAT, body | {"stream_options": {"include_usage": True}}))
        *tokens, usage, done = await stream(reader)
    assert [token["choices"][0]["delta"]["content"] for token in tokens] == [" x"] * 3
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None, None, "length"]
    assert tokens[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({token["id"] for token in tokens}) == 1
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert done == "DONE"


async def test_usage_only_for_those_who_ask() -> None:
    async with served() as (_, reader, writer):
        writer.write(request("/v1/completions", {"prompt": "x", "max_completion_tokens": 1, "stream": True}))
        token, done = await stream(reader)
    assert token["choices"] == [{"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}]
    assert done == "DONE"


async def test_whole_answers() -> None:
    async with served() as (mock, reader, writer):
        writer.write(request(CHAT, {"messages": [], "max_tokens": 4}))
        status, body = await whole(reader)
        assert (status, body["choices"][0]["message"]["content"]) == (200, " a a a a")
        writer.write(request("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}))
        _, body = await whole(reader)
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        first, second = mock.truth.records
        # a whole answer comes when its last token is due
        assert first.writes[-1] - first.received >= 0.005 - 1e-4
        assert second.writes[-1] - second.received >= 0.003 - 1e-4


@pytest.mark.parametrize("said", [{"parameters": {"max_tokens": 2}}, {"sampling_parameters": '{"max_tokens": 2}'}])
async def test_the_generate_extension(said: dict[str, Any]) -> None:
    async with served() as (_, reader, writer):
        writer.write(request("/v2/models/mock", method="GET"))
        assert "sampling_parameters" in [tensor["name"] for tensor in (await whole(reader))[1]["inputs"]]
        writer.write(request("/v2/models/mock/generate_stream", {"text_input": "x"} | said))
        assert [event["text_output"] for event in await stream(reader)] == [" a", " a"]
        writer.write(request("/v2/models/mock/generate", {"text_input": "x"} | said))
        assert (await whole(reader))[1]["text_output"] == " a a"


async def test_requests_of_unknown_length_are_refused() -> None:
    async with served() as (_, reader, writer):
        writer.write(f"POST {CHAT} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        assert (await whole(reader))[0] == 411
        assert await reader.read() == b""


async def test_other_questions() -> None:
    async with served(model="big") as (_, reader, writer):
        writer.write(request("/v1/models", method="GET"))
        assert [model["id"] for model in (await whole(reader))[1]["data"]] == ["big"]
        writer.write(request("/v2/repository/index", {}))
        assert (await whole(reader))[1] == [{"name": "big", "version": "1", "state": "READY"}]
        for method, path, body, status in (
            ("GET", "/health", None, 200),
            ("GET", "/metrics", None, 404),
            ("POST", "/v1/embeddings", {}, 404),
            ("POST", CHAT, [], 400),
            ("POST", CHAT, {"max_tokens": "many"}, 400),
            ("POST", "/v2/models/m/generate", {"sampling_parameters": "{"}, 400),
        ):
            writer.write(request(path, body, method))
            assert (await whole(reader))[0] == status, path


async def test_requests_in_pieces_and_behind_each_other() -> None:
    async with served() as (_, reader, writer):
        raw = request("/v1/completions", {"prompt": "x", "max_tokens": 2})
        for at in range(0, len(raw), 40):
            writer.write(raw[at : at + 40])
            await asyncio.sleep(0)
        assert (await whole(reader))[0] == 200
        writer.write(raw + raw)
        assert [(await whole(reader))[0] for _ in range(2)] == [200, 200]
        writer.write(request(CHAT, {"max_tokens": 1}, fields="Expect: 100-continue\r\n")[:-5])
        assert await head(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_closes_when_it_is_told() -> None:
    async with served() as (_, reader, writer):
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        writer.write(request("/v1/completions", body, fields="Connection: close\r\n"))
        assert len(await stream(reader)) == 3
        assert await reader.read() == b""


async def test_it_tells_the_truth() -> None:
    async with served(ttft_ms=20, itl_ms=5) as (mock, reader, writer):
        writer.write(request("/v1/completions", {"prompt": "x", "max_tokens": 10, "stream": True}))
        await stream(reader)
        writer.write(request("/truth?each", method="GET"))
        _, truth = await whole(reader)
        (record,) = truth["requests"]
        due = [record["received"] + 0.02 + 0.005 * n for n in range(10)]
        assert record["late"] == pytest.approx([time - at for time, at in zip(record["writes"], due, strict=True)])
        assert min(record["late"]) > -1e-4
        assert truth["ttft_ms"]["p50"] == pytest.approx(1e3 * (record["writes"][0] - record["received"]), abs=2e-3)
        assert (truth["completed"], truth["output_tokens"], truth["itl_ms"]["count"]) == (1, 10, 9)
        writer.write(request("/truth", method="DELETE"))
        await whole(reader)
        assert not mock.truth.records
        writer.write(request("/truth", method="GET"))
        assert (await whole(reader))[1]["completed"] == 0


@pytest.mark.parametrize(("per_write", "groups"), [(1, 7), (3, 3), (0, 1)])
async def test_tokens_that_come_together(per_write: int, groups: int) -> None:
    async with served(tokens_per_write=per_write) as (mock, reader, writer):
        writer.write(request("/v1/completions", {"prompt": "x", "max_tokens": 7, "stream": True}))
        assert len(await stream(reader)) == 8
        (record,) = mock.truth.records
        assert len(record.writes) == 7
        assert len(set(record.writes)) == groups


async def test_a_reader_that_is_slow_gets_everything() -> None:
    async with served(ttft_ms=0, itl_ms=0, text="x" * 1000) as (mock, reader, writer):
        writer.write(request("/v1/completions", {"prompt": "x", "max_tokens": 20_000, "stream": True}))
        while not mock.blocked:
            await asyncio.sleep(0.001)
        assert not mock.truth.records
        assert len(await stream(reader)) == 20_001


async def test_those_who_leave_are_forgotten() -> None:
    async with served(ttft_ms=0, itl_ms=3_600_000) as (mock, reader, writer):
        writer.write(request("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True}))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        while mock.connections:
            await asyncio.sleep(0.001)
        assert not mock.truth.records


@pytest.mark.parametrize(
    ("settings", "message"), [({"ttft_ms": "-1"}, "ttft-ms"), ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1")]
)
def test_what_cannot_be_is_said(settings: dict[str, str], message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        main(settings)


def test_the_command_says_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["loadtest", "mock", "--ttft-ms", "-1"])
    assert capsys.readouterr().err.startswith("penstock loadtest mock: error: --ttft-ms: ")
