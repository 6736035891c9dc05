"""New connections beside others that keep the event loop busy."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop

from penstock.gateway.requests import acceptor
from penstock.gateway.requests.acceptor import Acceptor
from penstock.gateway.requests.tls import TlsSettings

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def run(loop: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


def connecting(count: int, port: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_crowd_is_let_in_within_a_few_turns_of_the_loop(loop: str) -> None:
    made: list[asyncio.BaseTransport] = []

    class Counted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def main() -> None:
        accepting = Acceptor(TlsSettings(port="http"), Counted, 10, 2048)
        port = accepting.bind("127.0.0.1", 0)
        await accepting.start()
        clients = connecting(100, port)
        for _ in range(12):  # four of them accept, and setting up a connection takes some
            await asyncio.sleep(0)
        assert len(made) == 100
        accepting.close()
        for client in clients:
            client.close()

    run(loop, main)


@pytest.mark.parametrize("loop", LOOPS)
def test_connections_that_the_kernel_has_taken_in_are_served_at_the_end(loop: str) -> None:
    """Their clients may have sent a request already, and the kernel would reset them."""

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            cast("asyncio.Transport", transport).write(b"hello")
            transport.close()

    async def main() -> None:
        accepting = Acceptor(TlsSettings(port="http"), Greeting, 10, 2048)
        port = accepting.bind("127.0.0.1", 0)
        await accepting.start()
        clients = connecting(100, port)
        await accepting.refuse()
        for client in clients:
            assert await asyncio.to_thread(client.recv, 16) == b"hello"
            client.close()
        with pytest.raises(ConnectionRefusedError):
            connecting(1, port)

    run(loop, main)


class Full:
    """Stands for a socket of a process without free descriptors."""

    def __init__(self, bound: socket.socket) -> None:
        self._bound = bound
        self.tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._bound.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)


@pytest.mark.parametrize("loop", LOOPS)
def test_without_descriptors_it_goes_on_a_little_later(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full: list[Full] = []

    def listener(*words: Any, **options: Any) -> Any:
        full.append(Full(socket.create_server(("127.0.0.1", 0))))
        return full[0]

    async def main() -> None:
        made = asyncio.Event()

        class First(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set()

        accepting = Acceptor(TlsSettings(port="http"), First, 10, 2048)
        [client] = connecting(1, accepting.bind("127.0.0.1", 0))
        await accepting.start()
        await asyncio.wait_for(made.wait(), 30)
        assert full[0].tries >= 2
        accepting.close()
        client.close()

    monkeypatch.setattr(acceptor, "listener", listener)
    monkeypatch.setattr(acceptor, "_PAUSE_SECONDS", 0.01)
    run(loop, main)
