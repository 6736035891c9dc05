"""Classic models of a server with two fronts: one queue, one table of sequences, whichever front a request meets."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from support.processes import children
from support.sequences import write_sums
from support.server import Server, serving, wait_until
from support.tritonclient import infer_inputs

T = TypeVar("T")

CONNECTIONS = 12
"""At one time. The kernel spreads them over both fronts by chance."""
SURE_OF_BOTH = 24
"""With so many, one run in eight million has all of them at one front."""
TENSORS = """
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
TOGETHER = "dynamic_batching { preferred_batch_size: [ 12 ] max_queue_delay_microseconds: 20000000 }"
SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "300" } }'
OF_SECOND_FRONT = 1 << 32
"""Its traces have numbers from here on."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("repository")
    for name, config in {
        "together": f"max_batch_size: 16 {TOGETHER}",
        "slow": SLOW,
        "echo": "max_batch_size: 8",
    }.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'backend: "identity" {config} {TENSORS}')
    write_sums(folder / "sums")
    shutil.copytree(Path(__file__).parents[1] / "documented/repeat_int32", folder / "repeat_int32")
    flags = (
        *("--model-repository", str(folder), "--model-control-mode=explicit", "--load-model=*"),
        *("--fronts=2", "--allow-client-shm", "--trace-config", f"triton,file={traces}"),
    )
    with serving(*flags) as running:
        yield running


def over_http(server: Server, call: Callable[[triton_http.InferenceServerClient], T]) -> T:
    """What it gives, on a connection of its own."""
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        return call(client)


def at_once(call: Callable[[int], T], connections: int = CONNECTIONS) -> list[T]:
    """On as many threads as there are to be connections."""
    with ThreadPoolExecutor(connections) as threads:
        return list(threads.map(call, range(connections)))


def echoed(server: Server, model: str, value: float) -> float:
    inputs = infer_inputs(triton_http, INPUT0=np.array([[value]] if model != "slow" else [value], np.float32))
    return float(over_http(server, lambda client: client.infer(model, inputs)).as_numpy("OUTPUT0").ravel()[0])


def statistics(server: Server, model: str) -> Any:
    [found] = over_http(server, lambda client: client.get_inference_statistics(model))["model_stats"]
    return found


def test_requests_of_both_fronts_make_one_batch(server: Server) -> None:
    assert at_once(lambda number: echoed(server, "together", number)) == list(range(CONNECTIONS))
    found = statistics(server, "together")
    assert (found["inference_count"], found["execution_count"]) == (CONNECTIONS, 1)


def test_a_sequence_goes_on_whatever_front_its_requests_meet(server: Server) -> None:
    def sums(number: int) -> list[int]:
        found = []
        for step in range(6):
            inputs = infer_inputs(triton_http, INPUT=np.array([[number]], np.int32))
            options = {"sequence_id": number + 1, "sequence_start": step == 0, "sequence_end": step == 5}
            result = over_http(server, lambda client, i=inputs, o=options: client.infer("sums", i, **o))  # type: ignore[misc]
            found.append(int(result.as_numpy("SUM")[0, 0]))
        return found

    for number, found in enumerate(at_once(sums)):
        assert found == [100 + number * step for step in range(1, 7)]


def test_streams_of_a_decoupled_model(server: Server) -> None:
    def values(number: int) -> list[int]:
        results: queue.Queue[Any] = queue.Queue()
        delays = np.zeros(100, np.uint32)
        numbers = np.arange(100, dtype=np.int32) + number
        inputs = infer_inputs(triton_grpc, IN=numbers, DELAY=delays, WAIT=np.zeros(1, np.uint32))
        found = []
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: results.put(error or result))
            client.async_stream_infer("repeat_int32", inputs, enable_empty_final_response=True)
            while True:
                result = results.get(timeout=30)
                if isinstance(result, Exception):
                    raise result
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
                found.append(int(result.as_numpy("OUT")[0]))
            client.stop_stream()
        return found

    assert at_once(values) == [list(range(number, number + 100)) for number in range(CONNECTIONS)]


def test_a_region_that_is_registered_is_known_to_every_front(server: Server) -> None:
    memory = SharedMemory(create=True, size=64)
    try:
        over_http(server, lambda client: client.register_system_shared_memory("region", memory.name, 64))
        memory.buf[:12] = np.array([1, 2, 3], np.float32).tobytes()

        def doubled(number: int) -> int:
            given = triton_http.InferInput("INPUT0", [1, 3], "FP32")
            given.set_shared_memory("region", 12)
            wanted = triton_http.InferRequestedOutput("OUTPUT0")
            wanted.set_shared_memory("region", 12, 16)
            over_http(server, lambda client: client.infer("echo", [given], outputs=[wanted]))
            return 1

        assert sum(at_once(doubled)) == CONNECTIONS
        assert np.frombuffer(memory.buf, np.float32)[4:7].tolist() == [1, 2, 3]
        over_http(server, lambda client: client.unregister_system_shared_memory("region"))

        def refused(number: int) -> str:
            with pytest.raises(InferenceServerException) as caught:
                doubled(number)
            return str(caught.value.message())

        assert set(at_once(refused)) == {"Unable to find shared memory region: 'region'"}
    finally:
        memory.close()
        memory.unlink()


def test_each_front_traces_from_the_answer_on_that_asked_for_it(server: Server, traces: Path) -> None:
    on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": str(SURE_OF_BOTH), "log_frequency": "1"}
    over_http(server, lambda client: client.update_trace_settings("echo", on))
    at_once(lambda number: echoed(server, "echo", number), SURE_OF_BOTH)

    def left() -> str:
        return str(over_http(server, lambda client: client.get_trace_settings("echo"))["trace_count"])

    wait_until(lambda: left() == "0")
    found = [json.loads(path.read_text()) for path in traces.parent.iterdir()]
    assert len(found) == SURE_OF_BOTH
    for events in found:
        marks = [mark["name"] for event in events for mark in event.get("timestamps", ())]
        assert marks[:3] == ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START"]
        assert {"QUEUE_START", "COMPUTE_START", "COMPUTE_END", "REQUEST_END", "HTTP_SEND_END"} <= set(marks)
    assert {events[0]["id"] > OF_SECOND_FRONT for events in found} == {True, False}, "it is the fronts that have traced"


def test_reloads_under_load_fail_no_request(server: Server) -> None:
    config = over_http(server, lambda client: client.get_model_config("echo"))
    done = threading.Event()

    def reload() -> int:
        try:
            for size in range(9, 14):
                changed = json.dumps(config | {"max_batch_size": size})
                over_http(server, lambda client: client.load_model("echo", config=changed))  # noqa: B023
        finally:
            done.set()
        return 1

    def infer(number: int) -> int:
        count = 0
        while number and not done.is_set():
            assert echoed(server, "echo", number) == number
            count += 1
        return count if number else reload()

    assert min(at_once(infer)) > 0


def test_errors_are_those_of_one_process(server: Server) -> None:
    def text(model: str, version: str = "") -> set[str]:
        def error(number: int) -> str:
            inputs = infer_inputs(triton_http, WRONG=np.zeros((1, 1), np.float32))
            with pytest.raises(InferenceServerException) as caught:
                over_http(server, lambda client: client.infer(model, inputs, version, request_id="7"))
            return str(caught.value.message())

        return set(at_once(error))

    assert text("nope") == {"Request for unknown model: 'nope' is not found"}
    assert text("echo", "9") == {"Request for unknown model: 'echo' version 9 is not found"}
    assert text("echo") == {"unexpected inference input 'WRONG' for model 'echo'"}


def test_a_front_that_is_killed_takes_its_own_requests_with_it(server: Server) -> None:
    victim = children(server.process.pid, "penstock.gateway.server.front_server")[0]
    before = statistics(server, "slow")["inference_stats"]
    connected = threading.Barrier(SURE_OF_BOTH)
    with closing(httpx.Client()) as client, ThreadPoolExecutor(SURE_OF_BOTH) as threads:
        assert client.get(server.url + "/v2").status_code == 200

        def outcome(number: int) -> bool:
            inputs = infer_inputs(triton_http, INPUT0=np.array([number], np.float32))

            def call(one: triton_http.InferenceServerClient) -> float:
                assert one.is_server_live()
                connected.wait(60)  # a connection made after the front's death is the other front's
                return float(one.infer("slow", inputs).as_numpy("OUTPUT0")[0])

            try:
                return over_http(server, call) == number
            except Exception:
                return False

        asked = [threads.submit(outcome, number) for number in range(SURE_OF_BOTH)]
        wait_until(lambda: _pending(server) >= SURE_OF_BOTH // 2)
        victim.kill()
        outcomes = [each.result(60) for each in asked]
    assert 0 < sum(outcomes) < SURE_OF_BOTH
    server.wait_for_log(r"front \d is back")
    wait_until(lambda: _pending(server) == 0)
    after = statistics(server, "slow")["inference_stats"]
    assert after["success"]["count"] - before["success"]["count"] >= sum(outcomes)
    assert after["fail"]["count"] > before["fail"]["count"]
    assert at_once(lambda number: echoed(server, "echo", number)) == list(range(CONNECTIONS))


def _pending(server: Server) -> float:
    text = httpx.get(server.operator + "/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith('nv_inference_pending_request_count{model="slow"')]
    return float(line.rsplit(" ", 1)[1])
