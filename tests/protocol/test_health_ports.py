"""Liveness and readiness on every port, which must all say the same."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from penstock.gateway.models.language.models import find_model
from penstock.gateway.requests.server_health import is_live
from support.processes import children
from support.python_backend import write_model
from support.server import Server, serving, wait_until

SIMULATED = ("--engine", "simulated", "--served-model-name", "m")
CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
CONFIG = """
backend: "python"
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
"""


def said(server: Server) -> tuple[bool, bool]:
    """(live, ready), in which all ports agree."""
    with grpc.insecure_channel(server.grpc) as channel:
        triton = GRPCInferenceServiceStub(channel)
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        ready = {
            "ServerReady": triton.ServerReady(pb.ServerReadyRequest()).ready,
            "grpc.health": check.status == health_pb2.HealthCheckResponse.SERVING,
        }
        live = {"ServerLive": triton.ServerLive(pb.ServerLiveRequest()).live}
    for port in (server.url, server.operator):
        live |= {port + path: httpx.get(port + path).status_code == 200 for path in ("/health", "/health/live")}
        ready[port] = httpx.get(port + "/health/ready").status_code == 200
    live["v2"] = httpx.get(server.url + "/v2/health/live").status_code == 200
    ready["v2"] = httpx.get(server.url + "/v2/health/ready").status_code == 200
    assert len(set(live.values())) == 1, live
    assert len(set(ready.values())) == 1, ready
    return live["v2"], ready["v2"]


def model_is_ready(server: Server, name: str) -> bool:
    """In which both ports agree."""
    over_http = httpx.get(f"{server.url}/v2/models/{name}/ready").status_code == 200
    with grpc.insecure_channel(server.grpc) as channel:
        assert GRPCInferenceServiceStub(channel).ModelReady(pb.ModelReadyRequest(name=name)).ready == over_http
    return over_http


def kill_for_good(server: Server) -> None:
    """Until the engine is not started again."""

    def gone() -> bool:
        for engine in children(server.process.pid, "penstock.engines.process.worker"):
            with suppress(psutil.NoSuchProcess):
                engine.kill()
        return any("it stays down" in line for line in server.log)

    wait_until(gone, 60)


@pytest.fixture
def repository(tmp_path: Path) -> str:
    write_model(tmp_path, CODE, name="classic")
    (tmp_path / "classic" / "config.pbtxt").write_text(CONFIG)
    return str(tmp_path)


def test_all_ports_agree_while_an_engine_hangs_and_afterwards() -> None:
    with serving(*SIMULATED, "--ready-timeout", "1.5", "--watchdog-timeout", "30") as server:
        wait_until(lambda: said(server) == (True, True))
        assert model_is_ready(server, "m")
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 503)
        assert said(server) == (True, False)
        assert not model_is_ready(server, "m")
        os.kill(engine, signal.SIGCONT)
        server.wait_ready()
        assert said(server) == (True, True)


AT_ONCE = """
import sys
if "penstock.gateway.cli" in sys.orig_argv:
    from penstock.engines.process import client
    client._BACKOFF = 0.0
"""
"""The server waits ten seconds in all between the restarts of an engine."""


def test_a_model_that_is_down_for_good_beside_a_healthy_one(
    repository: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    startup = tmp_path_factory.mktemp("startup")
    (startup / "sitecustomize.py").write_text(AT_ONCE)
    flags = (str(find_model(None).folder), *SIMULATED, "--model-repository", repository)
    with serving(*flags, environ={"PYTHONPATH": str(startup)}) as server:
        assert said(server) == (True, True)
        kill_for_good(server)
        wait_until(lambda: not model_is_ready(server, "m"))
        assert said(server) == (True, False)
        assert model_is_ready(server, "classic")


@pytest.mark.parametrize(
    ("failed", "others", "strict", "live"),
    [
        ([], False, True, True),
        ([False], False, True, True),
        ([True], False, False, False),
        ([True], True, False, True),
        ([True], True, True, False),
        ([True, False], False, False, True),
        ([True, True], False, False, False),
    ],
)
def test_a_server_without_any_model_left_is_not_live(
    failed: list[bool], others: bool, strict: bool, live: bool
) -> None:
    assert is_live(failed, others, strict=strict) == live


def test_idle_connections_keep_nobody_out() -> None:
    """Of a process with few descriptors, as shells and containers may give it."""
    server = Server("--engine", "simulated", "--served-model-name", "m", open_files=256)
    idle: list[socket.socket] = []
    try:
        server.wait_ready()
        idle += [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(400)]
        assert httpx.get(server.url + "/health/live").status_code == 200
        answer = server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
    finally:
        for each in idle:
            each.close()
        server.close()
