"""How a front's part of the server ends: what is let in still comes to the engines, what cannot go on is replaced."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from penstock.classic.python.link import ArenaFiles
from penstock.engines.errors import EngineError, NotReadyError
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.configuration.config import Config
from penstock.gateway.processes.fronts.front_process import FrontProcess, Services
from penstock.gateway.processes.fronts.messages import Begin, Failed, Serving, Table, decode_from_front
from penstock.gateway.processes.fronts.model_table import Used
from penstock.gateway.processes.fronts.supervisor import Fronts, Slot
from penstock.gateway.processes.model_host.connection import HostConnection
from penstock.gateway.processes.model_host.host import ModelHost
from penstock.gateway.processes.model_host.messages import Published
from penstock.gateway.processes.model_host.publication import Sources
from penstock.gateway.requests.call import DrainState
from penstock.gateway.server.front_server import _run
from penstock.gateway.server.lifecycle import Server

NO_TAIL = memoryview(b"")


def services() -> Services:
    nothing: Any = SimpleNamespace(models=list, index=lambda *, ready: [], ready=True)
    host = ModelHost(Sources(nothing, SharedMemoryRegions(False), Tracing()))
    return Services(
        host=host,
        drain=DrainState(),
        quota_of=lambda digest: None,
        add_usage=lambda usage: None,
        app=nothing,
        find_handler=nothing,
    )


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


async def test_a_front_that_has_lost_its_supervisor_ends_and_leaves_it_its_folder(tmp_path: Path) -> None:
    """The supervisor lives: its sockets are in there."""
    ours, theirs = socket.socketpair()
    files = ArenaFiles("penstock-test")
    ending = asyncio.create_task(_run(theirs, os.dup(files.down), os.dup(files.up), []))
    supervisor = HostConnection(files.up, files.down, decode_from_front, lambda message, tail: None, lambda: None)
    await supervisor.open(ours)
    folder = str(tmp_path)
    supervisor.send(Begin(number=0, fronts=1, config=Config(), salt_key=b"", folder=folder, first_trace=1, listens=()))
    supervisor.send(Published(1, [], [], None))
    supervisor.send(Table(revision=1, models=(), routed=()))
    await supervisor.end()
    async with asyncio.timeout(60):
        assert await ending == 1
    assert tmp_path.is_dir()


async def test_a_front_that_cannot_go_on_is_ended() -> None:
    """Another one takes its place (`Fronts`)."""
    killed: list[bool] = []
    front = FrontProcess(0, {}, services())
    process: Any = SimpleNamespace(returncode=None, kill=lambda: killed.append(True))
    front._process = process
    front._take(Failed(reason="it cannot start"), NO_TAIL)
    assert not killed, "it ends by itself"
    front._take(Serving(), NO_TAIL)
    front._take(Failed(reason="it cannot go on"), NO_TAIL)
    assert killed


async def test_a_front_begins_with_what_counts_once_it_can_be_told_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is taken away while the process starts must not go on counting in it."""
    keys, given = ["revoked"], []

    async def spawn(*_: Any, **__: Any) -> Any:
        keys.clear()
        return SimpleNamespace(pid=1, returncode=1, wait=AsyncMock(return_value=1))

    def first(number: int) -> list[Any]:
        given.append(list(keys))
        return []

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    table: Any = SimpleNamespace(new=lambda routed: (Table(revision=1, models=(), routed=()), Used()))
    nobody: Any = None
    fronts = Fronts(first, table, nobody, services(), lambda: (), nobody)
    with pytest.raises(EngineError, match="ended with status 1"):
        await fronts._start(Slot(0, {}))
    assert given == [[]]
