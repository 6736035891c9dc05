"""What a busy fleet does to a server: reloads under load, clients that leave, models that die."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from protocol.raw_http import connect, post
from support.processes import child_pids
from support.server import Server, serving, wait_until

ADD = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number + ADDED)]))
        return answers
"""
CONFIG = """
backend: "python"
max_batch_size: 32
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
dynamic_batching { }
"""


def write_model(repository: Path, name: str, code: str, config: str = CONFIG) -> None:
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(code)


def body(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [number]}]}


def counts(server: Server, model: str) -> dict[str, Any]:
    [found] = httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"]
    return dict(found)


@pytest.mark.slow
def test_five_reloads_at_fifty_requests_a_second_lose_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, "add", "ADDED = 0\n" + ADD)
    with serving("--model-repository", str(tmp_path), "--model-control-mode=explicit", "--load-model=add") as server:
        server.wait_for_log(r"ready: 1 models")
        done, answers = threading.Event(), list[tuple[int, int]]()

        def ask(offset: float) -> None:
            """Ten requests a second, at their times whatever the answers take."""
            with httpx.Client(base_url=server.url, timeout=60) as client:
                due = time.monotonic() + offset
                while not done.wait(max(0.0, due - time.monotonic())):
                    answer = client.post("/v2/models/add/infer", json=body(1))
                    value = answer.json()["outputs"][0]["data"][0] if answer.status_code == 200 else -1
                    answers.append((answer.status_code, value))
                    due += 0.1

        asking = [threading.Thread(target=ask, args=(number / 50,)) for number in range(5)]
        for thread in asking:
            thread.start()
        client = triton_http.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60)
        for round_ in range(1, 6):
            write_model(tmp_path, "add", f"ADDED = {round_}\n" + ADD)
            client.load_model("add")
            # answered by the new version from the moment on at which loading is said to be over
            assert server.post("/v2/models/add/infer", body(1)).json()["outputs"][0]["data"] == [1 + round_]
        done.set()
        for thread in asking:
            thread.join()
        client.close()
        assert {status for status, _ in answers} == {200}
        values = [value for _, value in answers]
        assert set(values) <= set(range(1, 7))


@pytest.mark.slow
def test_three_thousand_cancelled_requests_leave_nothing_behind(tmp_path: Path) -> None:
    write_model(tmp_path, "add", "ADDED = 0\n" + ADD)
    with serving("--model-repository", str(tmp_path)) as server:
        server.wait_for_log(r"ready: 1 models")
        ended = asyncio.run(_cancel_many(server.grpc, total=3_000))
        wait_until(lambda: counts(server, "add")["inference_stats"]["success"]["count"] > 0)
        assert sum(ended.values()) == 3_000
        assert set(ended) <= {"answered", "cancelled", "refused"}
        assert ended["cancelled"] > 300

        def nothing_waits() -> bool:
            lines = httpx.get(server.operator + "/metrics").text.splitlines()
            return 'nv_inference_pending_request_count{model="add",version="1"} 0' in lines

        wait_until(nothing_waits)
        assert server.post("/v2/models/add/infer", body(5)).json()["outputs"][0]["data"] == [5]
        stats = counts(server, "add")["inference_stats"]
        assert stats["success"]["count"] + stats["fail"]["count"] <= 3_001
        assert stats["success"]["count"] >= ended["answered"]


def _how(error: str) -> str:
    """Streams that are reset faster than the library can clear them away are refused before they begin."""
    if "RST_STREAM with error code 7" in error:
        return "refused"
    return "cancelled" if "cancelled" in error.lower() else error


async def _cancel_many(address: str, total: int) -> Counter[str]:
    """Requests of which each is cancelled after a random moment, or answered before."""
    rng = random.Random(7)
    ended: Counter[str] = Counter()
    async with triton_aio.InferenceServerClient(address) as client:

        async def one() -> None:
            tensor = triton_aio.InferInput("IN", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.int32))
            try:
                async with asyncio.timeout(rng.random() * 0.02):
                    await client.infer("add", [tensor])
            except (TimeoutError, asyncio.CancelledError):
                ended["cancelled"] += 1
            except InferenceServerException as error:
                ended[_how(str(error))] += 1
            else:
                ended["answered"] += 1

        numbers = iter(range(total))

        async def several() -> None:
            for _ in numbers:
                await one()

        await asyncio.gather(*(several() for _ in range(64)))
    return ended


def test_clients_that_hang_up_are_cancelled(tmp_path: Path) -> None:
    slow = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            with Path(__file__).with_name("begun").open("a") as file:
                file.write("x")
            while not request.is_cancelled():
                time.sleep(0.005)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED))]
"""
    write_model(tmp_path, "slow", slow, CONFIG.replace("max_batch_size: 32", "max_batch_size: 1"))
    with serving("--model-repository", str(tmp_path)) as server:
        server.wait_for_log(r"ready: 1 models")
        begun = tmp_path / "slow" / "1" / "begun"
        for number, path in enumerate(("infer", "generate", "generate_stream"), 1):
            with connect(server.http_port) as client:
                client.sendall(post(body(1) if path == "infer" else {"IN": [1]}, f"/v2/models/slow/{path}"))
                wait_until(lambda number=number: begun.exists() and len(begun.read_text()) == number)
        wait_until(lambda: counts(server, "slow")["inference_stats"]["fail"]["count"] == 3)


def test_one_raising_request_in_a_batch_of_32_fails_alone(tmp_path: Path) -> None:
    raising = "ADDED = 0\n" + ADD.replace(
        "            answers.append",
        '            if number[0, 0] == 13:\n                raise ValueError("thirteen")\n            answers.append',
    )
    config = CONFIG.replace("dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 200000 }")
    write_model(tmp_path, "picky", raising, config)
    with serving("--model-repository", str(tmp_path)) as server:
        server.wait_for_log(r"ready: 1 models")

        async def ask_all() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                return await asyncio.gather(
                    *(client.post("/v2/models/picky/infer", json=body(number)) for number in range(32))
                )

        answers = asyncio.run(ask_all())
        assert [answer.status_code for answer in answers] == [500 if number == 13 else 200 for number in range(32)]
        assert "thirteen" in answers[13].json()["error"]
        assert [a.json()["outputs"][0]["data"][0] for a in answers if a.status_code == 200] == [
            number for number in range(32) if number != 13
        ]
        batches = {entry["batch_size"] for entry in counts(server, "picky")["batch_stats"]}
        assert max(batches) > 1


def test_a_killed_model_process_is_replaced(tmp_path: Path) -> None:
    write_model(tmp_path, "add", "ADDED = 0\n" + ADD)
    with serving("--model-repository", str(tmp_path)) as server:
        server.wait_for_log(r"ready: 1 models")
        ready = f"{server.url}/v2/models/add/ready"
        assert httpx.get(ready).status_code == 200
        [pid] = child_pids(server.process.pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: httpx.get(ready).status_code == 400 or child_pids(server.process.pid) not in ([pid], []))
        wait_until(lambda: httpx.get(ready).status_code == 200)
        assert server.post("/v2/models/add/infer", body(2)).json()["outputs"][0]["data"] == [2]
        assert json.loads(httpx.get(f"{server.url}/v2/models/add/config").text)["name"] == "add"
