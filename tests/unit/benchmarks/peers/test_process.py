"""Server processes: ready, confined, counted, and gone afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers.process import Process, confined_to, free_ports
from benchmarks.peers.usage import Meter, memory_bytes
from penstock.loadtest.environment import family
from penstock.loadtest.errors import LoadTestError
from support.processes import is_running
from support.server import wait_until

SERVER = """
import http.server, subprocess, sys
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); input()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def test_all_of_a_server_ends_even_what_does_not_listen(tmp_path: Path) -> None:
    ports = free_ports()
    with Process(python(SERVER, str(ports.http)), tmp_path / "log") as process:
        seconds = process.wait_until_ready(f"http://127.0.0.1:{ports.http}/health", 30)
        assert 0 < seconds < 30
        pids = family([process.pid])
        assert len(pids) == 2
        assert memory_bytes(process.pid) > 5 << 20
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with (
        Process(python("raise SystemExit('no such model')"), tmp_path / "log") as process,
        pytest.raises(LoadTestError, match=r"ended with 1 before it was ready\n(.*\n)*.*no such model"),
    ):
        process.wait_until_ready("http://127.0.0.1:9/health", 30)


def test_a_server_that_never_is_ready(tmp_path: Path) -> None:
    with (
        Process(python("input()"), tmp_path / "log", pipes=True) as process,
        pytest.raises(LoadTestError, match=r"not ready within 0\.1 s"),
    ):
        process.wait_until_ready("http://127.0.0.1:9/health", 0.1)
    assert not is_running(process.pid)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="/nowhere/server: No such file"):
        Process(["/nowhere/server"], tmp_path / "log")


def test_settings_of_the_user_do_not_reach_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "1")
    code = "import os; print(os.environ.get('PENSTOCK_HTTP_PORT'), os.environ['HF_HUB_OFFLINE'], os.environ['X'])"
    with Process(python(code), tmp_path / "log", env={"X": "given"}, pipes=True) as process:
        assert process.stdout.read() == b"None 1 given\n"


def test_cores_are_those_of_the_child_alone(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    code = "import os; print(*os.sched_getaffinity(0))"
    with Process(python(code), tmp_path / "log", cores=[core], pipes=True) as process:
        assert process.stdout.read() == f"{core}\n".encode()
    assert os.sched_getaffinity(0) == before
    with confined_to([core]):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


def test_ports_are_free_and_differ() -> None:
    assert len(set(free_ports())) == 3


FRONT = """
import subprocess, sys
spin = "import time\\nwhile time.process_time() < 0.6: pass\\nprint(flush=True); input()"
subprocess.run([sys.executable, "-c", spin])
"""


def test_cpu_is_counted_of_children_and_of_the_front_alone(tmp_path: Path) -> None:
    with Process(python(FRONT), tmp_path / "log", pipes=True) as process:
        meter = Meter(process.pid)
        process.stdout.readline()
        used = meter.read()
    assert used.server_seconds > 0.55
    assert used.front_seconds < 0.4
