"""A whole server without ports, in the process and on the event loop of a Ray actor.

Its engine is a process below the actor's, as it is below `penstock serve`, so the resources that Ray counts for the
actor are those of both.
"""

from __future__ import annotations

import logging
import sys

from starlette.types import Message, Receive, Scope, Send

from penstock.engines.errors import EngineDeadError, UnsupportedError
from penstock.gateway.apis.kserve.grpc.service import Service
from penstock.gateway.configuration.config import Config
from penstock.gateway.ray_serve.answer_forms import error_form
from penstock.gateway.ray_serve.load import Load, load_of
from penstock.gateway.ray_serve.stream_guard import BODY, REPLICA_HEADER
from penstock.gateway.requests.access import Access
from penstock.gateway.requests.call import name_request
from penstock.gateway.requests.context import Role
from penstock.gateway.requests.loading_board import LoadingBoard, LoadingLog
from penstock.gateway.server.lifecycle import Server
from penstock.gateway.transports.http.exchange import Exchange

logger = logging.getLogger("penstock")


class ReplicaServer:
    def __init__(self, config: Config, name: str) -> None:
        """`name` is told with every answer. Raises ConfigError."""
        _log_to_stderr(config.server.logging_level)
        self._max_num_seqs = config.models.scheduling.max_num_seqs
        self._server = Server(config, LoadingBoard(LoadingLog(logger.info)))
        self._header = (REPLICA_HEADER, name.encode())

    async def start(self) -> None:
        """Loads the models. Raises PenstockError, ConfigError."""
        try:
            await self._server.start()
        except BaseException:
            await self._server.stop()
            raise

    async def stop(self) -> None:
        await self._server.stop()

    def check(self) -> None:
        """Raises EngineDeadError when it will not serve again."""
        if not self._server.live:
            raise EngineDeadError("the models of this replica are down")

    @property
    def ready(self) -> bool:
        """A request would be served now."""
        return self._server.ready and all(engine.ready for engine in self._server.engines)

    def load(self) -> Load:
        return load_of([engine.stats for engine in self._server.engines], self._max_num_seqs)

    def grpc_service(self) -> Service:
        return self._server.grpc_service()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: what the HTTP port of a server answers, apart from what would change one replica alone."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        scope = _below_prefix(scope)
        if BODY in scope:
            receive = _carried(scope[BODY], receive)
        if scope["type"] == "http" and changes_one_replica(self._server.app.access(scope)):
            exchange = Exchange(scope, receive, named, self._server.drain)
            exchange.error_form = error_form(scope["path"])
            await exchange.fail(refusal())
            return
        await self._server.app(scope, receive, named)


async def _live(receive: Receive, send: Send) -> None:
    """Serve asks every app to start and to stop; this one has its own calls for that."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def _carried(body: bytes, receive: Receive) -> Receive:
    """The body that came with the scope, then what else `receive` says than the body."""
    is_told = False

    async def received() -> Message:
        nonlocal is_told
        if not is_told:
            is_told = True
            return {"type": "http.request", "body": body, "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return received


def changes_one_replica(access: Access | None) -> bool:
    return access is not None and access.role is Role.ADMIN


def refusal() -> UnsupportedError:
    return UnsupportedError(
        "This would change only the replica that the request has reached. Change the configuration and deploy it again."
    )


def _below_prefix(scope: Scope) -> Scope:
    """Serve names the application's prefix in `root_path`, and leaves it in the path."""
    prefix: str = scope.get("root_path", "").rstrip("/")
    path: str = scope.get("path", "")
    if not prefix or not path.startswith(prefix):
        return scope
    raw: bytes = scope.get("raw_path") or path.encode()
    return {**scope, "path": path[len(prefix) :] or "/", "raw_path": raw.removeprefix(prefix.encode()) or b"/"}


def _log_to_stderr(level: str) -> None:
    """Ray keeps what its workers write there, and says from which replica it is."""
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s%(request)s"))
    handler.addFilter(name_request)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
