"""A real `penstock serve` process for tests, on ports of its own choosing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from penstock.gateway import cli
from support.fork import ForkedProcess
from support.processes import child_pids

_LISTENING = re.compile(r"listening on https?://\S+:(\d+) \(gRPC (\d+), metrics (\d+)\)")


README = Path(__file__).parents[2] / "README.md"


def block(language: str, about: str) -> str:
    """The README's one block of code in this language that has these words."""
    [found] = [code for code in re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL) if about in code]
    return found


OPENVINO = ("--engine", "openvino")
VLLM = ("--engine", "vllm", "--threads", "1", "--dtype", "f32", "--kv-cache-memory", "64MiB")
WITH_VLLM = (
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
)
"""Of tests with an engine that few environments have, and that takes long to start."""

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def refusal(log: pytest.LogCaptureFixture, *flags: str) -> str:
    """The one error of a server that cannot start. It runs in this process, since another one would take a second."""
    try:
        assert cli.main(["serve", *ANY_PORTS, *flags]) == 1
    finally:  # the server's event loop leaves Ctrl-C without a handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
    [error] = [record for record in log.records if record.levelname == "ERROR"]
    assert error.exc_info is None
    return error.getMessage()


class Server:
    """Starts with `flags`; the log is kept in `log`. `open_files` is the process's limit."""

    def __init__(self, *flags: str, environ: dict[str, str] | None = None, open_files: int | None = None) -> None:
        arguments = ["serve", *ANY_PORTS, "--crash-dir=", *flags]  # nothing is left in a home folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        environ = clean | (environ or {})
        self.process: subprocess.Popen[str] | ForkedProcess
        if open_files is None and environ.get("PYTHONPATH") == clean.get("PYTHONPATH"):
            self.process = ForkedProcess(arguments, environ)
        else:  # they have to be there when the interpreter starts
            limit = [] if open_files is None else ["prlimit", f"--nofile={open_files}"]
            command = [*limit, sys.executable, "-m", "penstock.gateway.cli", *arguments]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.log: list[str] = []
        self._lines = threading.Condition()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            with self._lines:
                self.log.append(line.rstrip())
                self._lines.notify_all()
        with self._lines:
            self.log.append("<end>")
            self._lines.notify_all()

    def wait_for_log(self, pattern: str, seconds: float = 100) -> re.Match[str]:
        """The first match in the log, waited for."""

        def found() -> re.Match[str] | None:
            return next((m for line in self.log if (m := re.search(pattern, line))), None)

        with self._lines:
            self._lines.wait_for(lambda: found() is not None or "<end>" in self.log, seconds)
            match = found()
        if match is None:
            raise AssertionError(f"no {pattern!r} in the log:\n" + "\n".join(self.log))
        return match

    def _port(self, number: int) -> int:
        return int(self.wait_for_log(_LISTENING.pattern)[number])

    @property
    def http_port(self) -> int:
        return self._port(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port(1)}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self._port(2)}"

    @property
    def operator(self) -> str:
        return f"http://127.0.0.1:{self._port(3)}"

    def wait_ready(self, seconds: float = 100) -> Server:
        self.wait_for_log(r"ready: ", seconds)
        wait_until(lambda: httpx.get(self.url + "/health/ready").status_code == 200)
        return self

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[Any]]:
        """The events of a stream as JSON, and "[DONE]" as it is; leaving the block early disconnects."""
        with httpx.stream("POST", self.url + path, json=body | {"stream": True}, timeout=60) as response:
            if response.status_code != 200:
                raise AssertionError(response.read())
            yield (
                line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                for line in response.iter_lines()
                if line.startswith("data: ")
            )

    def state(self) -> dict[str, Any]:
        """The scheduler's state of the one model."""
        [state] = httpx.get(self.operator + "/debug/scheduler").json().values()
        return dict(state)

    def is_idle(self) -> bool:
        """The one model runs nothing and has all blocks back: steps under way keep theirs a moment longer."""
        state = self.state()
        return not state["num_running"] and state["num_free_blocks"] == state["num_blocks"]

    def engine_pid(self) -> int:
        """The engine process: the server's only child."""
        [pid] = child_pids(self.process.pid)
        return pid

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Signals the server and gives its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(*flags: str, environ: dict[str, str] | None = None, seconds: float = 100) -> Iterator[Server]:
    """A server that is ready, within so many seconds."""
    server = Server(*flags, environ=environ)
    try:
        yield server.wait_ready(seconds)
    finally:
        server.close()


def free_port() -> int:
    """Below those that the kernel gives to connections: one of them could take it before the server does."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)  # hypothesis seeds the other one alike everywhere
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Polls a process that has no other way to tell."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come about in time")
        threading.Event().wait(0.02)
