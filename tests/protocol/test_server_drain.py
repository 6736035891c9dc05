"""Start, drain and stop of a listening server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.server import HttpServer, ServerSettings
from penstock.gateway.transports.http.settings import AppSettings
from protocol.conftest import Serve, ServerThread
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from protocol.raw_http import connect, post, receive_all, receive_until, status

READY = b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
STREAM = post({"model": "tiny", "prompt": "hi", "stream": True})


class Gated(FakeDataPlane):
    """Says "a", and "b" once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        super().__init__(self._script)

    def _script(self, request: GenerateRequest) -> Iterable[Step]:
        return [[delta(0, "a")], self.gate, [delta(0, "b", "stop")]]

    async def open(self) -> None:
        self.gate.set()


def answer(server: ServerThread, request: bytes) -> bytes:
    with connect(server.port) as client:
        client.sendall(request)
        return receive_all(client)


async def called(function: object) -> None:
    assert callable(function)
    function()


def test_running_streams_outlive_the_drain(serve: Serve) -> None:
    dataplane = Gated()
    server = serve(dataplane)
    drain = server.settings.drain
    with connect(server.port) as client:
        client.sendall(STREAM)
        receive_until(client, b'"a"')
        server.do(called(drain.begin))
        assert status(answer(server, READY)) == 503
        refused = answer(server, STREAM)
        assert status(refused) == 503
        assert b"retry-after: " in refused
        assert b"connection: close" in refused
        port = server.port
        server.do(called(server.server.stop_accepting))
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        assert drain.in_flight == 1
        server.do(dataplane.open())
        assert server.do(drain.wait_idle(20))
        rest = receive_until(client, b"0\r\n\r\n")
    assert b'"b"' in rest
    assert b"[DONE]" in rest


def test_survivors_of_the_drain_end_with_an_error_event(serve: Serve) -> None:
    server = serve(Gated())
    drain = server.settings.drain
    with connect(server.port) as client:
        client.sendall(STREAM)
        receive_until(client, b'"a"')
        server.do(called(drain.expire))
        server.do(server.server.stop(5))
        rest = receive_all(client)
    assert b'"code":"not_ready"' in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_stop_closes_idle_connections_and_waits_for_running_responses(serve: Serve) -> None:
    dataplane = Gated()
    server = serve(dataplane)
    with connect(server.port) as idle, connect(server.port) as busy:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        receive_until(idle, b"}")
        busy.sendall(STREAM)
        receive_until(busy, b'"a"')

        async def stop_and_open() -> None:
            stopping = asyncio.create_task(server.server.stop(10))
            await asyncio.sleep(0)
            dataplane.gate.set()
            await stopping

        server.do(stop_and_open())
        assert receive_all(idle) == b""
        assert receive_all(busy).endswith(b"0\r\n\r\n")
    assert server.server.connections == 0


def test_stop_cuts_off_what_does_not_end(serve: Serve) -> None:
    dataplane = Gated()
    server = serve(dataplane)
    with connect(server.port) as client:
        client.sendall(STREAM)
        receive_until(client, b'"a"')
        server.do(server.server.stop(0.1))
        assert b"[DONE]" not in receive_all(client)
    assert dataplane.generations[0].closed.is_set()
    assert server.server.connections == 0


async def test_start_on_a_taken_port_raises(serve: Serve) -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    with pytest.raises(OSError, match="in use"):
        await HttpServer(app, ServerSettings(port=serve().port)).start()


def test_port_is_known_only_after_start() -> None:
    with pytest.raises(RuntimeError):
        _ = HttpServer(build_app(FakeDataPlane(), AppSettings()), ServerSettings(port=0)).port
