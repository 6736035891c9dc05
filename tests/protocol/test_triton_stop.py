"""A server ends when it is told to, whatever its models are doing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from protocol.raw_http import connect, post
from support.server import Server, serving, wait_until

HANGS = """
import os
import threading
from pathlib import Path

class TritonPythonModel:
    def execute(self, requests):
        (Path(__file__).parent.parent.parent / "pid").write_text(str(os.getpid()))
        threading.Event().wait()
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
REQUEST = {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}]}


def hang(server: Server, repository: Path) -> int:
    """Lets the model hang for a client that does not wait for it. Gives the pid of the model's process."""
    said = repository / "pid"
    with connect(server.http_port) as client:
        client.sendall(post(REQUEST, "/v2/models/hangs/infer"))
        wait_until(lambda: said.is_file() and said.read_text() != "")
    return int(said.read_text())


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(("timeout", "signals"), [("0.2", 1), ("600", 2)])
def test_a_model_that_hangs_does_not_keep_the_server_from_ending(tmp_path: Path, timeout: str, signals: int) -> None:
    folder = tmp_path / "hangs" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(HANGS)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    with serving("--model-repository", str(tmp_path), "--exit-timeout-secs", timeout) as server:
        pid = hang(server, tmp_path)
        server.process.send_signal(signal.SIGTERM)
        if signals > 1:
            wait_until(lambda: refuses(server))
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        wait_until(lambda: is_gone(pid))


def refuses(server: Server) -> bool:
    """The first signal has been seen: nobody listens any more."""
    try:
        httpx.get(f"{server.url}/v2/health/live")
    except httpx.HTTPError:
        return True
    return False
