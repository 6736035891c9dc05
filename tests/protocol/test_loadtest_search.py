"""Sweeps, searches, comparisons and tuning as commands, against real servers with a simulated engine. A step of it
takes 10 ms or longer and holds four requests: ten tokens take at least 100 ms, and 40 requests per second are the most.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fork import ForkedProcess, completed
from support.processes import child_pids, is_running
from support.server import Server, serving, wait_until

SIMULATED = ("--engine", "simulated", "--served-model-name", "m", "--max-num-seqs", "4")
LOAD = ("--no-live", "--no-calibrate", "--prompt-tokens", "16", "--output-tokens", "10", "--warmup", "1")
MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.05)
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]) for tensor in tensors]
"""
CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*SIMULATED, "--sim-step-ms", "10") as running:
        yield running


def penstock(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = completed(*words)
    assert done.returncode == status, done.stderr
    return done


def measured(server: Server, *words: str) -> dict[str, Any]:
    done = penstock("loadtest", "--url", server.url, *LOAD, *words, "--json", "-")
    return dict(json.loads(done.stdout))


def test_more_at_a_time_than_the_server_takes_have_to_wait(server: Server, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    study = measured(server, "--sweep", "concurrency=4,32", "--duration", "1", "--html", str(page))
    few, many = (point["report"] for point in study["points"])
    assert (few["options"]["load"]["concurrency"], many["options"]["load"]["concurrency"]) == (4, 32)
    assert many["ttft_ms"]["p50"] > few["ttft_ms"]["p50"] + 100  # seven rounds of 100 ms go before the last
    assert many["requests_per_s"] <= 41
    assert "concurrency" in page.read_text()


def test_the_rate_is_below_what_the_engine_can(server: Server) -> None:
    words = ("--rate", "16", "--arrival", "constant", "--duration", "1", "--precision", "1", "--max-runs", "7")
    study = measured(server, "--find", "rate", *words)
    assert study["held"] is None or study["held"] <= 40 / 0.95
    assert study["failed"] is not None or study["outcome"] == "client-bound", "on a machine that is busy"
    assert 4 < len(study["probes"]) <= 7
    assert not any(probe["held"] for probe in study["probes"] if probe["value"] > 48)


def test_two_servers_in_turns(server: Server) -> None:
    with serving(*SIMULATED, "--sim-step-ms", "40") as slow:
        study = measured(server, "--vs", slow.url, "--repeat", "2", "--duration", "0.5", "--concurrency", "2")
    assert study["order"] == "ABBA"
    assert len(study["a"]["runs"]) == len(study["b"]["runs"]) == 2
    [e2e] = [one for one in study["differences"] if one["figure"] == "e2e_ms.p50"]
    assert e2e["b"] >= 400
    assert e2e["ratio"] > 1


def test_reports_are_compared(server: Server, tmp_path: Path) -> None:
    for name in ("a", "b"):
        path = str(tmp_path / name)
        penstock("loadtest", "--url", server.url, *LOAD, "--requests", "4", "--json", path, "--label", name)
    done = penstock("loadtest", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "page"))
    assert "B / A" in done.stdout
    assert (tmp_path / "page").exists()


def test_a_run_is_summed_up(server: Server) -> None:
    done = penstock("loadtest", "--url", server.url, *LOAD, "--requests", "4")
    assert "4 completed, 0 failed" in done.stdout
    assert "TTFT, ms" in done.stdout


def test_no_server_is_an_error() -> None:
    done = penstock("loadtest", "--url", "http://127.0.0.1:9", "--model", "m", "--sweep", "rate=1", *LOAD, status=1)
    assert "no answer" in done.stderr


def test_an_interrupted_sweep_reports_what_was_run(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ("--sweep", "rate=20,1", "--requests", "20", "--json", str(path))
    process = ForkedProcess(["loadtest", "--url", server.url, *LOAD, *words])
    for line in process.stderr:
        if "run 2 of 2" in line:
            process.send_signal(signal.SIGINT)
            break
    said = process.stderr.read()
    assert process.wait(60) == 130, said
    study = json.loads(path.read_text())
    assert [point["value"] for point in study["points"]] == [20]
    assert study["ended_early"] == "by the user"


def test_tuning_finds_the_better_option() -> None:
    done = penstock(
        *("tune", "--param", "max_num_seqs=1,8", "--concurrency", "8", "--duration", "1", *LOAD, "--json", "-"),
        *("--", "serve", "--engine", "simulated", "--served-model-name", "m", "--sim-step-ms", "50"),
    )
    study = json.loads(done.stdout)
    assert [tried["settings"] for tried in study["tried"]] == [{"max_num_seqs": "1"}, {"max_num_seqs": "8"}]
    assert study["best"] == 1
    assert study["best_command"].startswith("penstock serve --engine simulated")
    assert study["best_command"].endswith("--max-num-seqs=8")


def test_tuning_a_model_of_a_repository(tmp_path: Path) -> None:
    """The instances of one model sleep side by side."""
    (tmp_path / "nap" / "1").mkdir(parents=True)
    (tmp_path / "nap" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "nap" / "1" / "model.py").write_text(MODEL)
    done = penstock(
        *("tune", "--param", "nap.instance_count=1,4", "--objective", "e2e_p50", "--protocol", "kserve-grpc"),
        *("--model", "nap", "--concurrency", "4", "--requests", "24", "--no-live", "--no-calibrate", "--json", "-"),
        *("--", "serve", "--model-repository", str(tmp_path)),
    )
    study = json.loads(done.stdout)
    assert study["best"] == 1
    assert study["tried"][0]["objective"] > 1.5 * study["tried"][1]["objective"]
    assert study["best_config"] == {"nap": ["instance_group [ { count: 4 } ]"]}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_tuning_that_is_ended_leaves_no_server(name: str, tmp_path: Path) -> None:
    words = ("--param", "max_num_seqs=1,2", "--requests", "100000", "--grace", "0.1")
    serve = ("serve", *SIMULATED, "--drain-timeout", "1")
    process = ForkedProcess(["tune", *words, *LOAD, "--", *serve])
    for line in process.stderr:
        if "server 1" in line:
            break
    children = child_pids(process.pid)
    process.send_signal(getattr(signal, name))
    process.send_signal(getattr(signal, name))
    assert process.wait(60) == 130
    assert children
    wait_until(lambda: not any(map(is_running, children)))
