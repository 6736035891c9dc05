"""The KServe front over HTTP with models of the test's making: as an ASGI app, and behind a real server."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import uvloop
from starlette.types import ASGIApp

from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.logs import LogSettings
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.server import HttpServer, ServerSettings
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane
from support.kserve import FakeModel, FakeModelStore, add_sub
from support.model_host import served_from_a_front

T = TypeVar("T")


def kserve_context(store: FakeModelStore, **options: Any) -> KServe:
    allowed = options.pop("allow_shared_memory", False)
    parts: dict[str, Any] = {
        "names": Catalogue(),
        "shared_memory": SharedMemoryRegions(allowed),
        "tracing": Tracing(),
        "logs": LogSettings(handlers=()),
        "health": ServerHealth(ready=lambda: store.ready),
    }
    return KServe(models=store, **(parts | options))


def kserve_app(context: KServe, settings: AppSettings | None = None) -> ASGIApp:
    return build_app(FakeDataPlane(), settings or AppSettings(), context)


class Answer:
    """A response over a plain connection; `headers` by small letters."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of an error in Triton's shape, which has nothing else in it."""
        found = self.json()
        assert list(found) == ["error"]
        assert isinstance(found["error"], str)
        return str(found["error"])


class KServeServer:
    """Serves the store's models on a port of its own; `do` runs a coroutine on the server's loop. `from_a_front`: from
    a front process's half of the model host's border."""

    def __init__(
        self, store: FakeModelStore, settings: AppSettings | None = None, *, from_a_front: bool = False, **options: Any
    ) -> None:
        self.store = store
        self._from_a_front = from_a_front
        self._ending = AsyncExitStack()
        self.settings = settings or AppSettings()
        self.context = kserve_context(store, **options)
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> KServeServer:
        self._thread.start()

        async def started() -> HttpServer:
            served = self.context
            if self._from_a_front:
                served = await self._ending.enter_async_context(served_from_a_front(self.context))
            app = kserve_app(served, self.settings)
            server = HttpServer(app, ServerSettings(port=0, limits=ConnectionLimits()))
            await server.start()
            return server

        self._server = self.do(started())
        self.port = self._server.port
        self.address = f"127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._server.stop(1.0))
        self.do(self._ending.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Awaitable[T], seconds: float = 60) -> T:
        async def awaited() -> T:
            return await work

        future: Future[T] = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        return future.result(seconds)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            found = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: bytes | dict[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)


class KServeFront:
    """The app over these models, called as ASGI: `await front(method, path, body, header_name="value")`."""

    def __init__(self, *models: FakeModel, settings: AppSettings | None = None, **options: Any) -> None:
        self.store = FakeModelStore(*(models or (add_sub(),)))
        self.settings = settings or AppSettings()
        self.app = kserve_app(kserve_context(self.store, **options), self.settings)

    async def __call__(self, method: str, path: str, body: Any = b"", **headers: str) -> AsgiCall:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await call(self.app, path, body, method=method, headers=named)


def error_of(answer: AsgiCall) -> str:
    """The message of an error in Triton's shape, which has nothing else in it."""
    found = answer.json()
    assert list(found) == ["error"]
    return str(found["error"])
