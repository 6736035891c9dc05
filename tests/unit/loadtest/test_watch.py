from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.loadtest import watch as module
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import options
from penstock.loadtest.report.model import ServerWatch
from penstock.loadtest.watch import Watch

PAGE = (
    "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {0}\n"
    "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total {1}\n"
)


class Pages:
    """A server with a page for each question: `page` gives it, None hangs up."""

    def __init__(self, page: Callable[[int], str | None]) -> None:
        self.heads: list[str] = []
        self.page = page
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        text = self.page(len(self.heads))
        if text is not None:
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()


@asynccontextmanager
async def serving(page: Callable[[int], str | None]) -> AsyncIterator[Pages]:
    pages = Pages(page)
    server = await asyncio.start_server(pages.answer, "127.0.0.1", 0)
    pages.port = server.sockets[0].getsockname()[1]
    yield pages
    server.close()


async def watched(pages: Pages, looks: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ServerWatch | None:
    """A run during which so many pages are read, beside the first and the last one."""
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.02)
    chosen = options({"url": f"http://127.0.0.1:{pages.port}", "model": "m"} | settings)
    async with Watch(chosen, ()) as watch:
        while len(pages.heads) < looks + 1:
            await asyncio.sleep(0.005)
    assert watch.other_cores(0.0) is not None
    return watch.result


async def test_what_a_server_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda n: PAGE.format(n, 100 * n)) as pages:
        found = await watched(pages, 3, monkeypatch)
    assert found is not None
    assert found.metrics_url == f"http://127.0.0.1:{pages.port}/metrics"
    running = found.metrics["vllm:num_requests_running"]
    assert running == list(range(2, 2 + len(running)))
    assert len(running) > 1
    assert found.counters == {"vllm:prompt_tokens_total": 100 * (len(pages.heads) - 1)}
    assert all(len(values) == len(found.seconds) for values in found.metrics.values())
    assert found.seconds == sorted(found.seconds)


async def test_pages_that_fail_are_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda n: PAGE.format(n, n) if n in (1, 3) else None if n % 2 else "\x00<html>") as pages:
        found = await watched(pages, 5, monkeypatch)
    assert found is not None
    assert found.metrics["vllm:num_requests_running"] == [0, 3, 3, 3][: len(found.seconds)] + [3] * (
        len(found.seconds) - 4
    )
    assert found.counters == {"vllm:prompt_tokens_total": 2}


async def test_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options({"url": "http://192.0.2.1", "metrics_url": "none"})
    times = iter([1000.0, 1007.0])
    monkeypatch.setattr(module.time, "time", lambda: next(times))
    async with Watch(chosen, ()) as watch:
        pass
    assert 6000 < watch.clock_ms <= 7000


async def test_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda n: "{}") as pages:
        found = await watched(pages, 0, monkeypatch)
        assert found is None or not found.metrics_url
        asked = len(pages.heads)
        await watched(pages, asked - 1, monkeypatch, metrics_url="none")
        assert len(pages.heads) == asked
        with pytest.raises(LoadTestError, match="metrics-url"):
            await watched(pages, 0, monkeypatch, metrics_url=f"http://127.0.0.1:{pages.port}/other")


async def test_keys_are_for_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda n: PAGE.format(n, n)) as server, serving(lambda n: PAGE.format(n, n)) as other:
        await watched(server, 0, monkeypatch, api_key="secret")
        assert "Bearer secret" in server.heads[0]
        url = f"127.0.0.1:{other.port}/other?x=1"
        chosen = options({"url": f"http://127.0.0.1:{server.port}", "api_key": "secret", "metrics_url": url})
        async with Watch(chosen, ()) as watch:
            pass
        assert watch.result is not None
        assert other.heads[0].startswith("GET /other?x=1 ")
        assert "secret" not in "".join(other.heads)


@pytest.mark.parametrize(
    ("url", "pages"),
    [
        ("http://h:8000", ["http://h:8000/metrics", "http://h:8002/metrics"]),
        ("https://h:8000/v1", ["https://h:8000/metrics", "http://h:8002/metrics"]),
        ("h:8001", ["http://h:8001/metrics", "http://h:8002/metrics"]),
        ("http://[::1]:8000", ["http://[::1]:8000/metrics", "http://[::1]:8002/metrics"]),
        ("http://h:9000", ["http://h:9000/metrics"]),
    ],
)
def test_where_pages_are_looked_for(url: str, pages: list[str]) -> None:
    assert module._candidates(options({"url": url})) == pages
