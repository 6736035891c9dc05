"""nginx, Envoy and Caddy in front of two servers, with the examples' own settings: streams come as they are made, over
HTTP/2 and gRPC; clients that leave end their requests; a server that drains away costs nobody anything, and one that
dies only what it was answering."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from deploy.places import program
from deploy.proxies import PROXIES, Front, proxied
from support.server import Server, wait_until

pytest.importorskip("h2")
SLOW = (
    *("--engine", "simulated", "--served-model-name", "m", "--sim-step-ms", "20"),
    *("--allowed-hosts", "localhost", "--drain-delay", "5"),
)
FEW = ("--max-num-seqs", "8", "--max-queued-requests", "1")
LONG = {"model": "m", "prompt": "hi", "max_tokens": 15_000, "stream": True, "ignore_eos": True}
"""Five minutes of tokens: a client that sees the first one while it runs has not waited for the last, and a request
that ends sooner has been ended by its client."""


@contextmanager
def two_servers(proxy: str, folder: Path, *flags: str) -> Iterator[Front]:
    program(proxy)
    servers = [Server(*SLOW, *flags), Server(*SLOW, *flags)]
    try:
        for server in servers:
            server.wait_ready()
        with proxied(proxy, folder, servers) as running:
            yield running
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope="module", params=PROXIES)
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with two_servers(request.param, tmp_path_factory.mktemp(request.param), *FEW) as running:
        yield running


@pytest.mark.parametrize("http2", [False, True])
def test_events_come_as_they_are_made(front: Front, http2: bool) -> None:
    with front.client(http2=http2) as asking:
        with asking.stream("POST", "/v1/completions", json=LONG) as response:
            assert response.status_code == 200
            assert response.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            events = response.iter_lines()  # kept: httpx ends the request with it
            assert next(events).startswith("data: ")
            wait_until(lambda: front.num_running() == 1)
        asking.close()  # httpx gives streams of HTTP/2 up only with their connection
        wait_until(lambda: front.num_running() == 0)


def tensor(name: str, datatype: str, value: object) -> Any:
    found = triton.InferInput(name, [1], datatype)
    found.set_data_from_numpy(np.array([value], np.bool_ if datatype == "BOOL" else np.object_))
    return found


def test_grpc_streams_come_as_they_are_made(front: Front) -> None:
    inputs = [
        tensor("text_input", "BYTES", b"hi"),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", b'{"max_tokens": 15000, "ignore_eos": true}'),
    ]
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    address = f"localhost:{front.grpc_port}"
    with triton.InferenceServerClient(address, ssl=True, root_certificates=str(front.certificate)) as asking:
        assert asking.is_server_ready()
        asking.start_stream(callback=lambda result, error: answers.put((result, error)))
        asking.async_stream_infer("m", inputs)
        _, error = answers.get(timeout=30)
        assert error is None
        wait_until(lambda: front.num_running() == 1)
        asking.stop_stream(cancel_requests=True)
        wait_until(lambda: front.num_running() == 0)


def test_large_requests_reach_the_server(front: Front) -> None:
    with front.client() as asking:
        answer = asking.post("/v1/completions", json=LONG | {"prompt": "word " * 600_000})
    assert answer.status_code == 400, answer.text
    assert "context" in answer.json()["error"]["message"]


def test_a_stream_takes_more_requests_than_one_body_may_have(front: Front) -> None:
    """72 MiB together: nginx counts them as one body, and the servers judge each."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    address = f"localhost:{front.grpc_port}"
    with triton.InferenceServerClient(address, ssl=True, root_certificates=str(front.certificate)) as asking:
        asking.start_stream(callback=lambda result, error: answers.put(error))
        for _ in range(9):
            asking.async_stream_infer("m", [tensor("text_input", "BYTES", b"words 78" * (1 << 20))])
            assert "context" in str(answers.get(timeout=60))


def test_servers_that_are_full_go_on_to_answer(front: Front) -> None:
    """Each takes nine requests at a time; the proxy takes none of them for dead."""

    def ask(_: int) -> int:
        with front.client(http2=False) as asking:
            return asking.post("/v1/completions", json=LONG | {"max_tokens": 10}).status_code

    with ThreadPoolExecutor(30) as pool:
        assert set(pool.map(ask, range(120))) == {200, 503}


def test_a_server_that_drains_away_costs_nobody_anything(front: Front) -> None:
    """Requests come all the time while one of two servers is told to end. It has a stream that it drains for, longer
    than its --drain-delay."""
    gone = threading.Event()

    def infer_on() -> int:
        number = 0
        inputs = [tensor("text_input", "BYTES", b"hi"), tensor("sampling_parameters", "BYTES", b'{"max_tokens": 2}')]
        address = f"localhost:{front.grpc_port}"
        with triton.InferenceServerClient(address, ssl=True, root_certificates=str(front.certificate)) as asking:
            while not gone.is_set():
                asking.infer("m", inputs)
                number += 1
        return number

    def generate_on() -> set[int]:
        with front.client() as asking:
            found = set()
            while not gone.is_set():
                body = {"text_input": "hi", "max_tokens": 2}
                found.add(asking.post("/v2/models/m/generate", json=body).status_code)
        return found

    def ask_on() -> list[tuple[int, str]]:
        found = []
        with front.client(http2=False) as asking:
            while not gone.is_set():
                answer = asking.post("/v1/completions", json=LONG | {"max_tokens": 25})
                found.append((answer.status_code, answer.text[-40:]))
        return found

    leaving = front.servers[0]
    with (
        ThreadPoolExecutor(6) as pool,
        leaving.stream("/v1/completions", LONG | {"max_tokens": 350}) as stream,
    ):
        next(stream)
        asking = [pool.submit(ask_on) for _ in range(4)]
        inferring, generating = pool.submit(infer_on), pool.submit(generate_on)
        try:
            wait_until(lambda: all(server.state()["num_running"] for server in front.servers))
            leaving.process.send_signal(signal.SIGTERM)
            assert leaving.process.wait(60) == 0
        finally:
            gone.set()
        ended = [each for future in asking for each in future.result()]
        assert inferring.result() > 0
        assert generating.result() == {200}
        assert list(stream)[-1] == "[DONE]"
    assert len(ended) >= 4
    assert [each for each in ended if each[0] != 200 or not each[1].endswith("data: [DONE]\n\n")] == []


@pytest.mark.parametrize("proxy", ["nginx", "envoy"])  # Debian's Caddy loses the bodies: docs/deploy.md
def test_a_server_that_dies_costs_later_requests_nothing(proxy: str, tmp_path: Path) -> None:
    """Many at once, before the proxy's checks have seen it: most of them are first sent to the dead server."""
    with two_servers(proxy, tmp_path) as front:
        front.servers[0].process.kill()
        front.servers[0].process.wait()

        def ask(_: int) -> int:
            with front.client(http2=False) as asking:
                return asking.post("/v1/completions", json=LONG | {"max_tokens": 5}).status_code

        with ThreadPoolExecutor(40) as pool:
            assert set(pool.map(ask, range(200))) == {200}
