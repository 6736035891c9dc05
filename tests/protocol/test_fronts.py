"""A server with two front processes: one server to its clients, whichever front they meet."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from penstock.gateway.requests.access import key_digest
from support.language_repository import write_trtllm, write_vllm
from support.processes import children, has_clients, is_running
from support.server import Server, serving, wait_until

ADMIN, USER, ONE, FEW, LATER = "admin-key", "user-key", "one-key", "few-key", "later-key"
KEYS = {
    ADMIN: 'tenant = "boss"\nroles = ["inference", "metadata", "metrics", "admin"]',
    USER: 'tenant = "user"',
    ONE: 'tenant = "one"\nconcurrent_requests = 1',
    FEW: 'tenant = "few"\nrequests_per_minute = 5',
}
CONNECTIONS = 12
"""At one time. The kernel spreads them over both fronts by chance."""
ECHO = """
backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def entry(key: str, rest: str) -> str:
    return f'[[key]]\nsha256 = "{key_digest(key.encode()).hex()}"\n{rest}\n'


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(entry(key, rest) for key, rest in KEYS.items()))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    (repository / "echo/1").mkdir(parents=True)
    (repository / "echo/config.pbtxt").write_text(ECHO)
    write_vllm(repository, "extra", "penstock-demo")
    write_trtllm(repository, "other", "penstock-demo")
    flags = (
        *("penstock-demo", "--engine=simulated", "--sim-step-ms=10", "--served-model-name=m", "--fronts=2"),
        *("--model-repository", str(repository), "--model-control-mode=explicit", "--load-model=echo,other"),
        *("--backend-config=vllm,engine=simulated", "--backend-config=tensorrtllm,engine=simulated"),
        *("--api-key-file", str(key_file), "--crash-dir", str(tmp_path_factory.mktemp("crashes")), "--console"),
    )
    with serving(*flags) as running:
        yield running


def fronts(server: Server) -> list[psutil.Process]:
    return children(server.process.pid, "penstock.gateway.server.front_server")


def client(server: Server, key: str = USER) -> openai.OpenAI:
    """Its requests come on a connection of its own."""
    return server.client(key)


def complete(server: Server, key: str = USER, **options: Any) -> Any:
    wanted = {"model": "m", "prompt": [300, 301], "max_tokens": 3} | options
    with client(server, key) as one:
        return one.completions.create(**wanted)


def over_both(call: Any) -> list[Any]:
    """What it gives, or raises, on as many connections, all at one time."""

    def result(number: int) -> Any:
        try:
            return call()
        except (openai.APIError, InferenceServerException) as error:
            return error

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return list(threads.map(result, range(CONNECTIONS)))


def samples(server: Server) -> dict[tuple[str, str], float]:
    """By name and all label values."""
    text = httpx.get(server.operator + "/metrics").text
    return {
        (sample.name, " ".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ended(server: Server, route: str) -> float:
    found = samples(server).items()
    return sum(value for (name, labels), value in found if name == "penstock_front_requests_total" and route in labels)


def echo_inputs() -> list[triton_http.InferInput]:
    given = triton_http.InferInput("INPUT0", [1, 3], "FP32")
    given.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
    return [given]


def test_clients_of_all_protocols_are_served_by_both_fronts(server: Server) -> None:
    def chat() -> str:
        with client(server) as one:
            chunks = one.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def echoed_over_http() -> list[float]:
        with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as one:
            result = one.infer("echo", echo_inputs(), headers={"authorization": f"Bearer {USER}"})
            return list(result.as_numpy("OUTPUT0")[0])

    before = ended(server, "/v1/completions")
    assert [each.usage.completion_tokens for each in over_both(lambda: complete(server))] == [3] * CONNECTIONS
    wait_until(lambda: ended(server, "/v1/completions") - before == CONNECTIONS)
    assert all(over_both(chat))
    assert over_both(echoed_over_http) == [[1, 2, 3]] * CONNECTIONS
    used = {
        labels: value for (name, labels), value in samples(server).items() if name == "penstock_front_cpu_seconds_total"
    }
    assert set(used) == {"0", "1"}


def text_input(name: str, value: str) -> triton_grpc.InferInput:
    found = triton_grpc.InferInput(name, [1], "BYTES")
    found.set_data_from_numpy(np.array([value.encode()], np.object_))
    return found


def test_a_grpc_stream_mixes_models_of_a_front_of_the_host_and_of_the_supervisor(server: Server) -> None:
    """The form of TensorRT-LLM's backend is served by the supervisor alone, since its clients cancel by ids."""
    echo = triton_grpc.InferInput("INPUT0", [1, 3], "FP32")
    echo.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
    most = triton_grpc.InferInput("sampling_param_max_tokens", [1], "INT32")
    most.set_data_from_numpy(np.array([4], np.int32))
    asked = {
        "m": [text_input("text_input", "hi"), text_input("sampling_parameters", '{"max_tokens": 4}')],
        "echo": [echo],
        "other": [text_input("text_input", "hi"), most],
    }

    def streamed() -> dict[str, Any]:
        results: queue.Queue[Any] = queue.Queue()
        found: dict[str, Any] = {}
        with triton_grpc.InferenceServerClient(server.grpc) as one:
            one.start_stream(
                lambda result, error: results.put(error or result), headers={"authorization": f"Bearer {USER}"}
            )
            for model, inputs in asked.items():
                one.async_stream_infer(model, inputs, request_id=model, enable_empty_final_response=True)
            finals = 0
            while finals < len(asked):
                result = results.get(timeout=60)
                if isinstance(result, Exception):
                    raise result
                response = result.get_response()
                if response.outputs:
                    found[response.id] = result
                finals += response.parameters["triton_final_response"].bool_param
            one.stop_stream()
        return found

    for found in over_both(streamed):
        assert set(found) == set(asked)
        assert list(found["echo"].as_numpy("OUTPUT0")[0]) == [1, 2, 3]
        assert found["other"].as_numpy("text_output")[0].startswith(b"hi")


def test_who_has_no_key_is_refused_by_each_front(server: Server) -> None:
    for error in over_both(lambda: complete(server, "nobody")):
        assert isinstance(error, openai.AuthenticationError)

    def infer() -> object:
        with triton_grpc.InferenceServerClient(server.grpc) as one:
            return one.infer("m", [text_input("text_input", "hi")])

    assert all("API key" in str(error) for error in over_both(infer))


def test_a_key_s_limits_hold_for_all_fronts_together(server: Server) -> None:
    results = over_both(lambda: complete(server, FEW))
    refused = [each for each in results if isinstance(each, openai.RateLimitError)]
    assert len(refused) == CONNECTIONS - 5
    assert all(each.response.headers["x-ratelimit-limit-requests"] == "5" for each in refused)
    with client(server, ONE) as one:
        stream = one.completions.create(model="m", prompt=[300], max_tokens=1900, stream=True)
        next(iter(stream))
        for error in over_both(lambda: complete(server, ONE)):
            assert isinstance(error, openai.RateLimitError)
        stream.close()
    wait_until(lambda: not isinstance(over_both(lambda: complete(server, ONE))[0], openai.APIError))


def test_a_model_that_is_loaded_or_unloaded_is_so_everywhere(server: Server) -> None:
    admin = {"authorization": f"Bearer {ADMIN}"}
    with triton_grpc.InferenceServerClient(server.grpc) as one:
        one.load_model("extra", headers=admin)
    assert [each.usage.completion_tokens for each in over_both(lambda: complete(server, model="extra"))] == [
        3
    ] * CONNECTIONS
    with client(server) as one:
        stream = one.completions.create(model="extra", prompt=[300], max_tokens=100, stream=True)
        chunks = [next(iter(stream))]
        httpx.post(server.url + "/v2/repository/models/extra/unload", headers=admin).raise_for_status()
        for error in over_both(lambda: complete(server, model="extra")):
            assert isinstance(error, openai.NotFoundError)
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"


def test_keys_that_are_read_again_count_at_each_front(server: Server, key_file: Path) -> None:
    assert isinstance(over_both(lambda: complete(server, LATER))[0], openai.AuthenticationError)
    key_file.write_text(key_file.read_text() + entry(LATER, 'tenant = "later"'))
    server.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: not any(isinstance(each, openai.APIError) for each in over_both(lambda: complete(server, LATER)))
    )


def test_requests_of_all_fronts_are_listed(server: Server) -> None:
    with ThreadPoolExecutor(4) as threads:
        streams = [
            client(server).completions.create(model="m", prompt=[300], max_tokens=1900, stream=True) for _ in range(4)
        ]
        list(threads.map(lambda stream: next(iter(stream)), streams))
        found = httpx.get(
            server.operator + "/debug/requests?tenant=user", headers={"authorization": f"Bearer {ADMIN}"}
        ).json()
        for stream in streams:
            stream.close()
    assert found["chosen"] == len(found["requests"]) == 4
    assert {each["stage"] for each in found["requests"]} == {"decoding"}


def test_the_console_shows_requests_of_all_fronts_and_ends_them(server: Server) -> None:
    headers = {"authorization": f"Bearer {ADMIN}", "x-penstock-console": "1"}
    body = {"model": "m", "prompt": [300], "max_tokens": 3000, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def complete_slowly(number: int) -> None:
        own = {"authorization": f"Bearer {USER}", "x-request-id": f"slow-{number}"}
        answers.append(httpx.post(server.url + "/v1/completions", json=body, headers=own, timeout=60))

    threads = [threading.Thread(target=complete_slowly, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    names = {f"slow-{number}" for number in range(CONNECTIONS)}
    with httpx.stream("GET", server.url + "/console/live?view=live", headers=headers, timeout=60) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        for event in events:
            in_fronts = {row["id"] for row in event.get("requests", {}).get("requests", ())}
            parts = event.get("engine", {}).get("parts", ())
            in_engine = {row[0] for part in parts for row in part["requests"]}
            if in_fronts >= names and in_engine >= names:
                break
        for name in names:
            ended = httpx.post(server.url + "/console/cancel", json={"id": name}, headers=headers)
            assert ended.status_code == 200, ended.text
        for event in events:
            names -= {row["id"] for row in event.get("requests", {}).get("ended", ()) if row["reason"] == "cancelled"}
            if not names:
                break
    for thread in threads:
        thread.join(60)
    assert {answer.json()["error"]["code"] for answer in answers} == {"cancelled"}


class Stream:
    """A stream of many tokens on a connection of its own, read in a thread."""

    def __init__(self, server: Server) -> None:
        self.client = client(server)
        self.tokens = 0
        self.finish_reason: str | None = None
        self.begun = threading.Event()
        self._server = server
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            stream = self.client.completions.create(
                model="m",
                prompt=[300],
                max_tokens=300,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            for chunk in stream:
                self.tokens += len(getattr(chunk.choices[0], "token_ids", None) or ())
                self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
                self.begun.set()
        except (openai.APIError, httpx.HTTPError):
            self.begun.set()


def test_a_front_that_is_killed_costs_its_own_connections_alone(server: Server) -> None:
    before = samples(server)
    victim, other = fronts(server)
    streams = [Stream(server) for _ in range(CONNECTIONS)]
    assert all(stream.begun.wait(30) for stream in streams)
    while not all(has_clients(front.pid) for front in (victim, other)):  # one run in 2,048
        streams.append(Stream(server))
        assert streams[-1].begun.wait(30)
    victim.kill()
    for stream in streams:
        stream.thread.join(60)
    whole = [stream for stream in streams if stream.finish_reason == "length"]
    assert 0 < len(whole) < len(streams)
    assert {stream.tokens for stream in whole} == {300}
    server.wait_for_log(r"front \d is back")
    assert other.is_running()
    evidence = Path(server.wait_for_log(r"crash report of front \d: (\S+)")[1])
    report = json.loads((evidence / "report.json").read_text())
    assert (report["kind"], report["pid"], report["signal"]) == ("front", victim.pid, "SIGKILL")
    wait_until(lambda: samples(server)["penstock_fronts", ""] == 2)
    wait_until(lambda: samples(server)["penstock_requests_running", "m"] == 0)
    after = samples(server)
    assert after["penstock_front_restarts_total", ""] == 1
    falling = {
        key for key, value in before.items() if key[0].endswith(("_total", "_bucket", "_count")) and after[key] < value
    }
    assert not falling
    assert len(fronts(server)) == 2
    assert not any(isinstance(each, Exception) for each in over_both(lambda: complete(server)))


def accepts(address: str) -> bool:
    """Whether a connection is accepted there, if only by the kernel, for a process that does not look."""
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_drain_ends_all_fronts_after_their_streams(server: Server) -> None:
    pids = [front.pid for front in fronts(server)]
    streams = [Stream(server) for _ in range(4)]
    assert all(stream.begun.wait(30) for stream in streams)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 503)
    headers = {"authorization": f"Bearer {USER}"}
    refused = httpx.post(server.url + "/v1/completions", json={"model": "m", "prompt": [300]}, headers=headers)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    wait_until(lambda: not accepts(server.grpc))
    for stream in streams:
        stream.thread.join(60)
    assert [stream.tokens for stream in streams] == [300] * 4
    assert server.process.wait(30) == 0
    assert not any(map(is_running, pids))


def test_fronts_end_when_their_supervisor_is_killed() -> None:
    with serving("--engine=simulated", "--served-model-name=m", "--fronts=2") as server:
        pids = [front.pid for front in fronts(server)]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
        wait_until(lambda: not any(map(is_running, pids)))
