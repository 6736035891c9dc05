"""Real servers on free ports: the HTTP front over a scripted data plane, and whole server processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import uvloop

from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.server import HttpServer, ServerSettings
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from protocol.fake_dataplane import FakeDataPlane
from support.keys import api_keys
from support.server import serving

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """All that a test with a real client needs to know of a server."""

    url: str
    model: str
    api_key: str


class ServerThread:
    """Serves a data plane; `do` runs a coroutine on the server's loop and gives its result here."""

    def __init__(
        self,
        dataplane: DataPlane,
        settings: AppSettings,
        limits: ConnectionLimits,
        tls: TlsSettings | None = None,
        *,
        http2: bool = True,
    ) -> None:
        self.dataplane = dataplane
        self.settings = settings
        self._server_settings = ServerSettings(
            port=0, limits=limits, tls=tls or TlsSettings(port="http"), intake=settings.intake, http2=http2
        )
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> ServerThread:
        self._thread.start()

        async def started() -> HttpServer:
            app = build_app(self.dataplane, self.settings)
            server = HttpServer(app, self._server_settings)
            await server.start()
            return server

        self.server = self.do(started())
        return self

    @property
    def port(self) -> int:
        return self.server.port

    def do(self, work: Awaitable[T], seconds: float = 60) -> T:
        async def awaited() -> T:
            return await work

        future: Future[T] = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        return future.result(seconds)

    def close(self) -> None:
        self.do(self.server.stop(1.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Serve = Callable[..., ServerThread]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts servers of scripted data planes: `serve(dataplane, limits=..., tls=..., **AppSettings fields)`. Each
    `tick` they look for what takes too long."""
    servers: list[ServerThread] = []

    def start(
        dataplane: DataPlane | None = None,
        limits: ConnectionLimits | None = None,
        tls: TlsSettings | None = None,
        *,
        http2: bool = True,
        tick: float = 0.1,
        **settings: Any,
    ) -> ServerThread:
        monkeypatch.setattr("penstock.gateway.transports.http.server._TICK_SECONDS", tick)
        thread = ServerThread(
            dataplane or FakeDataPlane(), AppSettings(**settings), limits or ConnectionLimits(), tls, http2=http2
        )
        servers.append(thread)
        return thread.start()

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module", params=["scripted", "demo"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """The server that real clients talk to; it needs a key. Once a script behind the HTTP front alone, once a whole
    server process with the demo model."""
    if request.param == "demo":
        with serving("--api-key", "secret") as process:
            yield Endpoint(process.url, "penstock-demo", "secret")
    else:
        settings = AppSettings(keys=api_keys({"tests": "secret"}))
        thread = ServerThread(FakeDataPlane(), settings, ConnectionLimits()).start()
        yield Endpoint(f"http://127.0.0.1:{thread.port}", "tiny", "secret")
        thread.close()
