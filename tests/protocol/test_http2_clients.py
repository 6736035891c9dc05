"""Real clients over HTTP/2 on the HTTP port: httpx, OpenAI's SDK, curl, nghttp and h2load, node."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from protocol.conftest import ServerThread
from protocol.fake_dataplane import FakeDataPlane, delta
from protocol.http2_client import Http2Client
from protocol.raw_http import connect
from support.kserve import FakeModelStore, add_sub, identity
from support.kserve_http import KServeServer
from support.tls import client_context, make_certificate, tls_settings

TEXT = {"model": "tiny", "prompt": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tls")
    make_certificate(found, "server")
    return found


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerThread]:
    thread = ServerThread(FakeDataPlane(), AppSettings(), ConnectionLimits()).start()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def secure(folder: Path) -> Iterator[ServerThread]:
    thread = ServerThread(FakeDataPlane(), AppSettings(), ConnectionLimits(), tls_settings("http", folder)).start()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def kserve() -> Iterator[KServeServer]:
    with KServeServer(FakeModelStore(add_sub(), identity("FP32", [-1], "echo")), max_input_bytes=8 << 20) as server:
        yield server


async def test_openai_sdk_streams_many_chats_on_one_connection(secure: ServerThread, folder: Path) -> None:
    http = httpx.AsyncClient(http2=True, http1=False, verify=client_context(folder / "server.pem"))
    async with AsyncOpenAI(base_url=f"https://localhost:{secure.port}/v1", api_key="none", http_client=http) as client:

        async def chat() -> str:
            streamed = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in streamed if chunk.choices])

        await chat()
        assert await asyncio.gather(*[chat() for _ in range(20)]) == ["one two three"] * 20
        assert secure.server.connections_by_version() == {"1.1": 0, "2": 1}


def test_a_client_chooses_the_version_in_the_handshake(secure: ServerThread, folder: Path) -> None:
    url = f"https://localhost:{secure.port}/health"
    for http2, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
        with httpx.Client(http2=http2, verify=client_context(folder / "server.pem")) as client:
            assert client.get(url).http_version == version


def test_without_http2_the_handshake_does_not_offer_it(folder: Path) -> None:
    tls = tls_settings("http", folder, http2=False)
    thread = ServerThread(FakeDataPlane(), AppSettings(), ConnectionLimits(), tls, http2=False).start()
    try:
        with httpx.Client(http2=True, verify=client_context(folder / "server.pem")) as client:
            assert client.get(f"https://localhost:{thread.port}/health").http_version == "HTTP/1.1"
    finally:
        thread.close()


def test_a_connection_for_which_there_is_no_room_gets_no_answer_of_the_other_version(folder: Path) -> None:
    data = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
    limits = ConnectionLimits(max_connections=1)
    thread = ServerThread(data, AppSettings(), limits, tls_settings("http", folder)).start()
    context = client_context(folder / "server.pem")
    context.set_alpn_protocols(["h2"])

    def client() -> Http2Client:
        return Http2Client(thread.port, sock=context.wrap_socket(connect(thread.port), server_hostname="localhost"))

    try:
        with client() as busy:
            busy.ask("/v1/completions", 1, {**TEXT, "stream": True})
            busy.read_until(lambda: b'"a"' in busy.on(1).body)
            with contextlib.suppress(OSError), client() as other:
                assert other.socket.recv(1000) == b""
    finally:
        thread.close()


def test_kserve_json_binary_and_compressed(kserve: KServeServer) -> None:
    """As tritonclient sends them; itself it speaks HTTP/1.1 only."""
    values = np.arange(16, dtype=np.float32)
    names = ("INPUT0", "INPUT1")
    given = [{"name": name, "shape": [16], "datatype": "FP32", "data": values.tolist()} for name in names]
    with httpx.Client(http1=False, http2=True, base_url=f"http://{kserve.address}/v2") as client:
        answer = client.post("/models/add_sub/infer", json={"inputs": given}).json()
        assert answer["outputs"][0]["data"] == (values * 2).tolist()
        for each in given:
            del each["data"]
            each["parameters"] = {"binary_data_size": 64}
        head = json.dumps({"inputs": given, "parameters": {"binary_data_output": True}}).encode()
        body = gzip.compress(head + values.tobytes() * 2)
        sizes = {"inference-header-content-length": str(len(head)), "content-encoding": "gzip"}
        binary = client.post("/models/add_sub/infer", content=body, headers={**sizes, "accept-encoding": "gzip"})
        assert binary.headers["content-encoding"] == "gzip"
        start = int(binary.headers["inference-header-content-length"])
        assert np.frombuffer(binary.content[start : start + 64], np.float32).tolist() == (values * 2).tolist()
        assert client.post("/models/none/infer", json={"inputs": []}).json().keys() == {"error"}


def test_kserve_bodies_of_many_windows_in_both_directions(kserve: KServeServer) -> None:
    values = np.arange(1 << 20, dtype=np.float32)
    given = {"name": "INPUT0", "shape": [1 << 20], "datatype": "FP32", "parameters": {"binary_data_size": 4 << 20}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    with httpx.Client(http1=False, http2=True, timeout=30) as client:
        answer = client.post(
            f"http://{kserve.address}/v2/models/echo/infer",
            content=head + values.tobytes(),
            headers={"inference-header-content-length": str(len(head))},
        )
        start = int(answer.headers["inference-header-content-length"])
        assert answer.content[start:] == values.tobytes()


def test_an_upload_that_is_refused_midway_is_answered(kserve: KServeServer) -> None:
    """httpx goes on sending until it learns that nobody reads."""
    with httpx.Client(http1=False, http2=True, timeout=30) as client:
        url = f"http://{kserve.address}/v2/models/echo/infer"
        answer = client.post(url, content=iter([b" " * (1 << 20)] * 12))
        assert answer.status_code == 413
        assert client.get(f"http://{kserve.address}/v2").status_code == 200


def run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_reads_a_stream_in_the_version_that_it_asks_for(
    plain: ServerThread, secure: ServerThread, folder: Path
) -> None:
    shown = ["-sS", "-w", "\n%{http_version} %{response_code}", "-H", "content-type: application/json"]
    body = json.dumps({**TEXT, "stream": True})
    for options, server, version in (
        (["--http2-prior-knowledge"], plain, "2"),
        (["--http2"], plain, "1.1"),  # asks for an upgrade, which servers may ignore
        (["--http2", "--cacert", f"{folder}/server.pem"], secure, "2"),
        (["--http1.1", "--cacert", f"{folder}/server.pem"], secure, "1.1"),
    ):
        scheme = "http" if server is plain else "https"
        url = f"{scheme}://localhost:{server.port}/v1/completions"
        out = run("curl", *options, *shown, "-d", body, url)
        assert "data: [DONE]" in out
        assert out.endswith(f"{version} 200")


def test_curl_gets_the_answer_to_an_upload_that_is_refused(plain: ServerThread, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b" " * (12 << 20))
    url = f"http://localhost:{plain.port}/v1/completions"
    for header in ("Expect:", "Transfer-Encoding:"):  # without and with an announcement
        out = run(
            "curl", "-sS", "--http2-prior-knowledge", "-w", "%{response_code}", "-H", "content-type: application/json",
            "-H", header, "--data-binary", f"@{tmp_path}/large", url
        )  # fmt: skip
        assert out.endswith("413"), out


def test_nghttp2_s_clients(plain: ServerThread) -> None:
    url = f"http://localhost:{plain.port}/health"
    assert '{"status":"live"}' in run("nghttp", url)
    assert "2000 succeeded" in run("h2load", "-n", "2000", "-c", "4", "-m", "50", url)
    assert "200 succeeded" in run("h2load", "--h1", "-n", "200", "-c", "4", url)


NODE = """
const http2 = require('node:http2');
const client = http2.connect(process.argv[1]);
const body = JSON.stringify({model: 'tiny', prompt: 'hi', stream: true});
let open = 20, text = '';
for (let i = 0; i < open; i++) {
  const stream = client.request({':method': 'POST', ':path': '/v1/completions', 'content-type': 'application/json'});
  stream.setEncoding('utf8');
  stream.on('data', (data) => { text += data; });
  stream.on('end', () => { if (--open === 0) { console.log(text.split('[DONE]').length - 1); client.close(); } });
  stream.end(body);
}
"""


LEAVING = """
const http2 = require('node:http2');
const client = http2.connect(process.argv[1]);
const body = JSON.stringify({model: 'tiny', prompt: 'hi', stream: true});
const stream = client.request({':method': 'POST', ':path': '/v1/completions', 'content-type': 'application/json'});
stream.on('data', () => stream.close(http2.constants.NGHTTP2_CANCEL));
stream.on('close', () => {
  const other = client.request({':path': '/health'});
  other.on('response', (head) => { console.log(head[':status']); });
  process.stdin.on('data', () => client.close());
});
stream.end(body);
"""


def test_node_leaves_a_stream_and_its_generation_ends_while_the_connection_goes_on() -> None:
    """httpx does not tell the server when a stream is left."""
    dataplane = FakeDataPlane(lambda _: [[delta(0, "one")], asyncio.Event()])
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    server = ServerThread(dataplane, AppSettings(), ConnectionLimits()).start()
    command = ["node", "-e", LEAVING, f"http://localhost:{server.port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        assert node.stdout.readline().strip() == "200"
        server.do(dataplane.generations[0].closed.wait())
        assert server.server.connections == 1
        node.stdin.write("\n")
        node.stdin.close()
    server.close()


def test_node_reads_20_streams_on_one_connection(plain: ServerThread) -> None:
    assert run("node", "-e", NODE, f"http://localhost:{plain.port}").strip() == "20"
