"""TLS on the HTTP port, with clients that behave and clients that do not."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path

import aiohttp
import httpx
import pytest
import tritonclient.grpc
import tritonclient.http.aio
from openai import OpenAI
from tritonclient.utils import InferenceServerException

from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.transports.http.stream import ConnectionLimits
from protocol.conftest import Serve
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from protocol.raw_http import connect, post, read_slowly, receive_all, receive_until, status
from support.server import Server, serving, wait_until
from support.tls import client_context, make_certificate, shown_certificate, tls_settings, use_certificate

TEXT = {"model": "tiny", "prompt": "hi"}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client", "stranger"):
        make_certificate(folder, name)
    return folder


def secure(
    port: int, trusted: Path, certificate: Path | None = None, receive_buffer: int | None = None
) -> ssl.SSLSocket:
    context = client_context(trusted, certificate)
    return context.wrap_socket(connect(port, receive_buffer), server_hostname="localhost")


def test_openai_clients_answers_and_streams(serve: Serve, made: Path) -> None:
    server = serve(tls=tls_settings("http", made))
    http = httpx.Client(verify=client_context(made / "server.pem"))
    with OpenAI(base_url=f"https://localhost:{server.port}/v1", api_key="none", http_client=http) as client:
        assert client.completions.create(**TEXT).choices[0].text == "one two three"
        streamed = client.completions.create(**TEXT, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == "one two three"
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://localhost:{server.port}/health")


def test_an_answer_is_one_write_and_a_connection_serves_several(serve: Serve, made: Path) -> None:
    server = serve(tls=tls_settings("http", made))
    with secure(server.port, made / "server.pem") as client:
        for _ in range(3):
            client.sendall(post(TEXT))
            assert client.recv(1 << 14).endswith(b"}"), "head and body in one record"
        client.sendall(post({**TEXT, "stream": True}))
        assert status(receive_until(client, b"0\r\n\r\n")) == 200


@pytest.mark.parametrize("data", [GET + b"\r\n", b"\x16\x03\x01\x00\x05hello", b"\0" * 1000])
def test_what_is_no_tls_is_closed_and_harms_nobody(
    serve: Serve, made: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=tls_settings("http", made))
    with connect(server.port) as client:
        client.sendall(data)
        assert b"HTTP/1.1" not in receive_all(client)
    assert httpx.get(f"https://localhost:{server.port}/health", verify=client_context(made / "server.pem")).is_success
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_handshake_has_a_time_limit(serve: Serve, made: Path) -> None:
    server = serve(tls=tls_settings("http", made), limits=ConnectionLimits(header_timeout=0.2))
    with connect(server.port) as client:
        assert receive_all(client) == b""


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_old_versions_of_tls_are_refused(serve: Serve, made: Path) -> None:
    context = client_context(made / "server.pem")
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with connect(serve(tls=tls_settings("http", made)).port) as client, pytest.raises(ssl.SSLError):
        context.wrap_socket(client, server_hostname="localhost")


def test_only_clients_with_a_certificate_of_the_authority_are_served(serve: Serve, made: Path) -> None:
    tls = tls_settings("http", made, use_ssl_mutual=True, root_cert=f"{made}/client.pem")
    url = f"https://localhost:{serve(tls=tls).port}/health"
    assert httpx.get(url, verify=client_context(made / "server.pem", made / "client.pem")).is_success
    for shown in (None, made / "stranger.pem"):
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=client_context(made / "server.pem", shown))


def test_new_certificates_are_for_new_connections(serve: Serve, made: Path, tmp_path: Path) -> None:
    use_certificate(tmp_path, made, "server")
    (tmp_path / "root.pem").write_bytes((made / "client.pem").read_bytes())
    go_on = asyncio.Event()
    dataplane = FakeDataPlane(lambda _: [[delta(0, "one ")], go_on, [delta(0, "two", "stop")]])
    tls = tls_settings("http", tmp_path, use_ssl_mutual=True, root_cert=f"{tmp_path}/root.pem")
    server = serve(dataplane, tls=tls)
    url = f"https://localhost:{server.port}/health"
    with secure(server.port, made / "server.pem", made / "client.pem") as client:
        client.sendall(post({**TEXT, "stream": True}))
        receive_until(client, b"one")
        (tmp_path / "root.pem").write_bytes((made / "stranger.pem").read_bytes())
        use_certificate(tmp_path, made, "stranger")
        server.do(told(server.server.reload_certificates))
        wait_until(lambda: shown_certificate(server.port) == (made / "stranger.pem").read_text())
        assert httpx.get(url, verify=client_context(made / "stranger.pem", made / "stranger.pem")).is_success
        with pytest.raises(httpx.TransportError):  # its authority is not trusted any more
            httpx.get(url, verify=client_context(made / "stranger.pem", made / "client.pem"))
        server.do(told(go_on.set))
        assert b"two" in receive_until(client, b"0\r\n\r\n"), "the stream of before goes on"


async def told(act: Callable[[], None]) -> None:
    """On the server's loop."""
    act()


def test_a_certificate_that_cannot_be_used_changes_nothing(
    serve: Serve, made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_certificate(tmp_path, made, "server")
    server = serve(tls=tls_settings("http", tmp_path))
    (tmp_path / "server.key").write_bytes((made / "client.key").read_bytes())
    server.do(told(server.server.reload_certificates))
    wait_until(lambda: "http-server-cert: it cannot be used with http-server-key" in caplog.text)
    assert shown_certificate(server.port) == (made / "server.pem").read_text()


STREAMED = post({**TEXT, "stream": True}, "/v1/completions", b"Connection: close")


def test_a_slow_but_steady_reader_gets_everything(serve: Serve, made: Path) -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "x" * (3 << 20), "stop")]])
    server = serve(dataplane, tls=tls_settings("http", made), limits=ConnectionLimits(send_timeout=1), tick=1.0)
    with secure(server.port, made / "server.pem", receive_buffer=4096) as client:
        client.sendall(STREAMED)
        assert read_slowly(client, pause=0.008).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_reader_that_stops_reading_is_cut_off(serve: Serve, made: Path) -> None:
    def flood(_: GenerateRequest) -> Iterable[Step]:
        while True:
            yield [delta(0, "x" * 4096)]

    dataplane = FakeDataPlane(flood)
    server = serve(dataplane, tls=tls_settings("http", made), limits=ConnectionLimits(send_timeout=0.3))
    with secure(server.port, made / "server.pem", receive_buffer=4096) as client:
        client.sendall(post({**TEXT, "stream": True}))
        receive_until(client, b"200 OK")
        server.do(dataplane.generating.wait())
        server.do(dataplane.generations[0].closed.wait())
        assert server.do(server.settings.drain.wait_idle(20))


def test_refusals_arrive_and_idle_connections_end(serve: Serve, made: Path) -> None:
    limits = ConnectionLimits(keep_alive_timeout=0.2)
    server = serve(tls=tls_settings("http", made), limits=limits)
    with secure(server.port, made / "server.pem") as client:
        client.sendall(GET + b"A: " + b"b" * 65_536 + b"\r\n\r\n")
        assert status(receive_all(client)) == 431
    idle = secure(server.port, made / "server.pem")
    idle.sendall(GET + b"\r\n")
    receive_until(idle, b"}")
    wait_until(lambda: not server.server.connections)  # although this client does not answer the close
    idle.close()


SIMULATED = ("--engine", "simulated", "--served-model-name", "m")


def mutual(folder: Path, made: Path) -> list[str]:
    """Flags for both ports."""
    flags = []
    for port in ("http", "grpc"):
        flags += [f"--{port}-use-ssl-mutual", f"--{port}-root-cert", f"{made}/client.pem"]
        flags += [f"--{port}-server-cert", f"{folder}/server.pem", f"--{port}-server-key", f"{folder}/server.key"]
    return flags


def http_name(server: Server, made: Path, trusted: str, shown: str) -> str:
    """With tritonclient over HTTP: the server's name."""

    async def ask() -> str:
        context = client_context(made / f"{trusted}.pem", made / f"{shown}.pem")
        address = f"localhost:{server.http_port}"
        async with tritonclient.http.aio.InferenceServerClient(address, ssl=True, ssl_context=context) as client:
            assert await client.is_model_ready("m")
            return str((await client.get_server_metadata())["name"])

    return asyncio.run(ask())


def grpc_name(server: Server, made: Path, trusted: str, shown: str) -> str:
    files = {"private_key": f"{made}/{shown}.key", "certificate_chain": f"{made}/{shown}.pem"}
    with tritonclient.grpc.InferenceServerClient(
        server.grpc.replace("127.0.0.1", "localhost"), ssl=True, root_certificates=f"{made}/{trusted}.pem", **files
    ) as client:
        assert client.is_model_ready("m")
        return str(client.get_server_metadata().name)


def test_both_ports_of_a_server_with_triton_s_clients_and_sighup(made: Path, tmp_path: Path) -> None:
    use_certificate(tmp_path, made, "server")
    server = Server(*SIMULATED, *mutual(tmp_path, made), "--http-address", "0.0.0.0", "--grpc-address", "0.0.0.0")
    try:
        server.wait_for_log("ready: ")
        for ask in (http_name, grpc_name):
            assert ask(server, made, "server", "client") == "penstock"
            with pytest.raises((InferenceServerException, aiohttp.ClientError)):
                ask(server, made, "server", "stranger")
        assert httpx.get(server.operator + "/health/ready").is_success, "probes need no certificate"
        use_certificate(tmp_path, made, "stranger")
        server.process.send_signal(signal.SIGHUP)
        for port in ("http", "grpc"):
            server.wait_for_log(f"the {port} port has read its certificate again")
        for ask in (http_name, grpc_name):
            assert ask(server, made, "stranger", "client") == "penstock"
        assert server.stop() == 0
    finally:
        server.close()


def test_a_server_that_has_nothing_to_reload_ends_with_its_terminal() -> None:
    with serving(*SIMULATED) as server:
        assert server.stop(signal.SIGHUP) == -signal.SIGHUP


def test_files_of_a_port_without_tls_are_told() -> None:
    with serving(*SIMULATED, "--http-server-cert", "/some/file") as server:
        server.wait_for_log("http-server-cert is not used: --http-use-ssl turns TLS on")
