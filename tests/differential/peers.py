"""The two servers: Triton and ours, each with a repository of its own made from the same files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from differential import triton_server
from support.server import free_port

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Peer:
    """A server, as its clients see it; `folder` is its own, for files that a test shares with its models."""

    name: str
    folder: Path
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def repository(self) -> Path:
        return self.folder / "models"


@dataclass(frozen=True)
class Pair:
    triton: Peer
    ours: Peer
    revive: Callable[[], bool]
    """Starts Triton again if it has ended; whether it had. Its Python backend aborts now and then."""


@contextmanager
def both(environment: Path, folder: Path, models: Sequence[str], *flags: str) -> Iterator[Pair]:
    """Triton and our server with the same models and flags; both start at the same time."""
    triton, ours = _peer("triton", folder / "triton"), _peer("ours", folder / "ours")
    for peer in (triton, ours):
        for model in models:
            shutil.copytree(MODELS / model, peer.repository / model)

    def start() -> subprocess.Popen[bytes]:
        return triton_server.start(environment, folder / "triton.log", *_triton_flags(triton), *flags)

    def revive() -> bool:
        if running[0].poll() is None:
            return False
        running[0] = start()
        _wait(triton, running[0], folder / "triton.log")
        return True

    running = []
    try:
        running.append(start())
        running.append(_start_ours(folder / "ours.log", *_our_flags(ours), *flags))
        _wait(triton, running[0], folder / "triton.log")
        _wait(ours, running[1], folder / "ours.log")
        yield Pair(triton, ours, revive)
    finally:
        for process in running:
            _end(process)


def _peer(name: str, folder: Path) -> Peer:
    folder.mkdir(parents=True)
    return Peer(name, folder, free_port(), free_port(), free_port())


def _ports(peer: Peer) -> list[str]:
    return [
        f"--model-repository={peer.repository}",
        f"--http-port={peer.http_port}",
        f"--grpc-port={peer.grpc_port}",
        f"--metrics-port={peer.metrics_port}",
        "--disable-auto-complete-config",
        "--metrics-config=summary_latencies=true",
        "--http-header-forward-pattern=(x|triton)-seen.*",
        "--grpc-header-forward-pattern=(x|triton)-seen.*",
    ]


def _triton_flags(peer: Peer) -> list[str]:
    addresses = [f"--{port}-address=127.0.0.1" for port in ("http", "grpc", "metrics")]
    return [*_ports(peer), *addresses, "--allow-gpu-metrics=false", "--exit-on-error=false", "--exit-timeout-secs=1"]


def _our_flags(peer: Peer) -> list[str]:
    return [*_ports(peer), "--allow-client-shm", "--no-exit-on-error"]


def _start_ours(log: Path, *flags: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    command = [sys.executable, "-m", "penstock.gateway.cli", "serve", *flags]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=clean, start_new_session=True)


def _wait(peer: Peer, process: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    """Until it answers and has tried every model. Servers with models that cannot be loaded may never be ready."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(peer.url + "/v2/health/live").status_code == 200 and _settled(peer):
                return
        time.sleep(0.1)
    raise AssertionError(f"{peer.name} did not start:\n{log.read_text()[-4000:]}")


def _settled(peer: Peer) -> bool:
    """Triton listens when it has tried every model, ours before."""
    answer = httpx.post(peer.url + "/v2/repository/index", json={})
    index = answer.json() if answer.status_code == 200 else []
    states = [entry.get("state") for entry in index]
    return peer.name == "triton" or (bool(states) and all(state in ("READY", "UNAVAILABLE") for state in states))


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: Triton's stubs outlive a server that is killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
