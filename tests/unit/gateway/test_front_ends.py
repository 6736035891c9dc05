"""How a front's part of the server ends: what is let in still comes to the engines, what cannot go on is replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers_model_host import hosting
from penstock.engines.errors import NotReadyError, OverloadedError
from penstock.gateway.configuration.config import Config
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front_server import _Front
from penstock.gateway.fronts.forwarding import Forwarder
from penstock.gateway.fronts.front_process import FrontProcess
from penstock.gateway.fronts.messages import Begin, Failed, Serving
from penstock.gateway.kserve.store import ModelStore
from penstock.gateway.lifecycle import Server
from protocol.asgi_client import call


class Admitted:
    def interrupt(self, error: NotReadyError) -> None:
        raise AssertionError(error)


class Drained:
    """The models of a server."""

    drains = 0

    async def drain(self) -> None:
        self.drains += 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("with_fronts", [True, False])
async def test_engines_stay_open_for_fronts_until_these_have_ended_what_they_let_in(with_fronts: bool) -> None:
    """Other servers are told at once: they have other engines."""
    server, models, request = Server.__new__(Server), Drained(), Admitted()
    vars(server).update(_folder="a folder" if with_fronts else None, _drain=DrainState(), _models=models)
    server.drain.admit(request)
    idle = asyncio.create_task(server._idle())
    await settle()
    assert models.drains == (not with_fronts)
    server.drain.release(request)
    await idle
    assert models.drains == 1


async def test_a_front_that_has_lost_the_model_host_says_so(no_models: ModelStore, tmp_path: Path) -> None:
    sent: list[Any] = []
    channel: Any = SimpleNamespace(send=sent.append)
    begin = Begin(number=0, fronts=1, config=Config(), salt_key=b"", folder=str(tmp_path), listens=())
    async with hosting(no_models, fronts=2) as hosted:
        first, second = hosted.links
        _Front(begin, channel, first, {})
        other = _Front(begin, channel, second, {})
        await other.stop()
        await second.lost
        hosted.host.stop()
        await first.lost
        await settle()
    assert [each for each in sent if isinstance(each, Failed)] == [
        Failed(reason="its connection to the model host is lost")
    ]


@pytest.fixture
def no_models() -> Any:
    return SimpleNamespace(models=list, index=lambda *, ready: [], ready=True)


def test_a_front_that_cannot_go_on_is_ended() -> None:
    """Another one takes its place (`Fronts`)."""
    killed: list[bool] = []
    front = FrontProcess(0, {}, DrainState(), lambda digest: None, lambda usage: None)
    process: Any = SimpleNamespace(returncode=None, kill=lambda: killed.append(True))
    front._process = process
    front._take(Failed(reason="it cannot start"))
    assert not killed, "it ends by itself"
    front._take(Serving())
    front._take(Failed(reason="its connection to the model host is lost"))
    assert killed


async def test_a_front_passes_on_a_bounded_number_of_requests(tmp_path: Path) -> None:
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(lambda reader, writer: held.append(writer), tmp_path / "requests")
    forwarder = Forwarder(str(tmp_path / "requests"), 2)
    passages = [await forwarder._passage() for _ in range(2)]
    with pytest.raises(OverloadedError, match="Too many requests wait"):
        await forwarder._passage()
    refused = await call(forwarder.http, "/v1/models")
    assert refused.status == 503
    assert refused.headers["retry-after"] == "2"
    forwarder._give_back(passages.pop())
    passages.append(await forwarder._passage())
    for passage in passages:
        forwarder._give_back(passage)
    server.close()
    for writer in held:
        writer.close()
