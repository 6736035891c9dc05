"""A model from the hub: the ports are open while it comes, and every door says how far it is."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.hub import Hub, serving_hub
from support.processes import is_running
from support.server import Server, wait_until

DEMO = Path(__file__).parents[2] / "gateway" / "penstock" / "gateway" / "demo_model"
FILES = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.suffix in (".json", ".safetensors")}
PROGRESS = r"download: \d+\.\d of \d+\.\d MB"


@pytest.fixture
def hub() -> Any:
    with serving_hub(FILES) as running:
        running.open.clear()
        yield running


def start(hub: Hub, cache: Path, *flags: str) -> Server:
    return Server("org/small", "--engine", "simulated", *flags, environ=hub.environ(cache))


def index(server: Server) -> list[dict[str, str]]:
    lines: list[dict[str, str]] = httpx.post(server.url + "/v2/repository/index").json()
    return lines


def test_every_door_tells_how_far_a_download_is(hub: Hub, tmp_path: Path) -> None:
    server = start(hub, tmp_path)
    try:
        wait_until(lambda: re.fullmatch(PROGRESS, index(server)[0].get("reason", "")))
        [line] = index(server)
        assert (line["name"], line["version"], line["state"]) == ("org/small", "1", "LOADING")
        health = httpx.get(server.url + "/health/ready")
        assert health.status_code == 503
        assert re.fullmatch(PROGRESS, health.json()["loading"]["org/small"])
        assert httpx.get(server.url + "/v2/health/ready").status_code == 400, "as Triton"
        assert httpx.get(server.url + "/health/live").status_code == 200
        refused = server.post("/v1/completions", {"model": "org/small", "prompt": "x"})
        assert refused.status_code == 503
        assert "still loading (download: " in refused.json()["error"]["message"]
        assert server.post("/v1/completions", {"model": "other", "prompt": "x"}).status_code == 404
        ready = httpx.get(server.url + "/v2/models/org%2Fsmall/ready")
        assert ready.status_code == 400, "Triton's status for a model that is known and not ready"
        hub.open.set()
        server.wait_ready()
        answer = server.post("/v1/completions", {"model": "org/small", "prompt": "x", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert [line["state"] for line in index(server)] == ["READY"]
    finally:
        server.close()


def test_a_second_start_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    hub.open.set()
    for environ in (hub.environ(tmp_path), hub.environ(tmp_path) | {"HF_HUB_OFFLINE": "1"}):
        server = Server("org/small", "--engine", "simulated", "--served-model-name", "m", environ=environ)
        try:
            server.wait_ready()
            assert [line["name"] for line in index(server)] == ["m"]
        finally:
            server.close()


def test_a_server_ends_at_once_while_it_downloads(hub: Hub, tmp_path: Path) -> None:
    server = start(hub, tmp_path)
    try:
        wait_until(lambda: index(server)[0].get("reason"))
        children = psutil.Process(server.process.pid).children()  # an engine that waits for its model, and the download
        assert len(children) == 2
        assert server.stop(signal.SIGTERM) == 0
        wait_until(lambda: not any(is_running(child.pid) for child in children))
    finally:
        server.close()


def test_a_model_that_the_hub_does_not_have_ends_the_server(hub: Hub, tmp_path: Path) -> None:
    server = Server("org/absent", "--engine", "simulated", environ=hub.environ(tmp_path))
    try:
        server.wait_for_log("could not be loaded: org/absent is neither a folder or file here nor a model of the hub")
        assert server.process.wait(30) == 1
    finally:
        server.close()


def test_a_bar_on_a_terminal_is_gone_when_the_download_is_given_up(hub: Hub, tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.gateway.cli", "serve", "org/small", "--engine", "simulated", *ports],
        stderr=terminal,
        env=os.environ | hub.environ(tmp_path),
    )
    os.close(terminal)
    shown, told = "", False
    try:
        with suppress(OSError):  # Linux's way to say that nobody holds the other end any more
            while chunk := os.read(ours, 4096).decode():
                shown += chunk
                if not told and re.search(r"\[[#.]+\] org/small: " + PROGRESS, shown):
                    told = True
                    process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "] org/small: download: " in shown
    lines = [line.rpartition("\x1b[K")[2] for line in shown.replace("\r\n", "\n").split("\n")]
    assert lines[-1] == "", "nothing is left where the shell writes next"
    assert any(line.endswith("INFO    stopped") for line in lines), "log lines are whole"
