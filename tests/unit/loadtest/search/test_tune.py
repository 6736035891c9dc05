"""Tuning with small real processes as servers, and their load tests made up."""

from __future__ import annotations

import _thread
import os
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Options, OutputOptions
from penstock.loadtest.report.model import Interval
from penstock.loadtest.search.runs import Run
from penstock.loadtest.search.study import write_study
from penstock.loadtest.tune.findings import TuneReport, tuning_findings
from penstock.loadtest.tune.options import TuneOptions
from penstock.loadtest.tune.server import NotReadyError, running
from penstock.loadtest.tune.tune import Base, Tuner
from support.processes import is_running
from support.server import free_port, wait_until
from unit.loadtest.search.computed import answered, chosen, report_of

STUB = """
import http.server, os, pathlib, signal, subprocess, sys
port, folder, *flags = sys.argv[1:]
folder = pathlib.Path(folder)
if "--fail=1" in flags:
    sys.exit("there is no such model")
if "--stubborn=1" in flags:
    signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
if "--child=1" in flags:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (folder / "child").write_text(str(child.pid))
(folder / "pid").write_text(str(os.getpid()))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "--never=1" in flags else 200)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


class Stub:
    """The command of a server, and what it leaves in a folder."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.command = [sys.executable, "-c", STUB, str(port), str(folder)]

    def pid(self, name: str = "pid") -> int:
        return int((self.folder / name).read_text())


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path)


def start(stub: Stub, *flags: str, start_timeout: float = 20.0, stop_timeout: float = 20.0):  # type: ignore[no-untyped-def]
    return running([*stub.command, *flags], stub.url, start_timeout=start_timeout, stop_timeout=stop_timeout)


def test_it_runs_inside_and_has_ended_afterwards(stub: Stub) -> None:
    with start(stub):
        assert is_running(stub.pid())
    assert not is_running(stub.pid())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_is_stopped_whatever_happens(stub: Stub, error: type[BaseException]) -> None:
    with pytest.raises(error), start(stub):
        raise error
    assert not is_running(stub.pid())


def test_what_does_not_heed_sigterm_is_killed(stub: Stub) -> None:
    with start(stub, "--stubborn=1", stop_timeout=1.5):
        pass
    assert (stub.folder / "asked").exists()
    assert not is_running(stub.pid())


def test_what_it_has_started_is_killed_too(stub: Stub) -> None:
    with start(stub, "--child=1"):
        pass
    wait_until(lambda: not is_running(stub.pid("child")))


def test_interrupted_while_it_starts_it_is_stopped(stub: Stub) -> None:
    def interrupt() -> None:
        wait_until((stub.folder / "pid").exists)
        # Not by a real signal: the plugin that other tests load into this process leaves a signal stack behind that it
        # has freed (OpenVINO 2026.4 for CPUs), and no handler survives that.
        while True:
            _thread.interrupt_main()
            if stopped.wait(5):
                break  # else it came while a destructor ran, which swallows it

    stopped = threading.Event()
    ringing = threading.Thread(target=interrupt)
    ringing.start()
    with pytest.raises(KeyboardInterrupt), start(stub, "--never=1"):
        pytest.fail("it was never ready")
    stopped.set()
    ringing.join()
    assert not is_running(stub.pid())


def test_one_that_ends_says_why(stub: Stub) -> None:
    with pytest.raises(NotReadyError, match="ended with 1: there is no such model"), start(stub, "--fail=1"):
        pass


def test_one_that_is_never_ready_is_stopped(stub: Stub) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(NotReadyError, match=r"not ready after 1.5 s"), start(stub, "--never=1", start_timeout=1.5):
        pass
    assert set(psutil.Process().children()) <= before, "it may not have come to write its pid"


def test_another_server_is_not_measured(stub: Stub) -> None:
    with socket.create_server(("127.0.0.1", int(stub.url.rpartition(":")[2]))):  # noqa: SIM117
        with pytest.raises(LoadTestError, match="a server listens"), start(stub):
            pass
    assert not (stub.folder / "pid").exists()


def test_a_command_that_is_not_there() -> None:
    with (
        pytest.raises(LoadTestError, match="No such file"),
        running(["/nowhere/serve"], "http://127.0.0.1:9", start_timeout=1, stop_timeout=1),
    ):
        pass


class Bench:
    """Load tests whose E2E follows from the servers' flags, told by the label."""

    def __init__(self, stub: Stub, spread: float = 0.0, stop_at: int = 100) -> None:
        self.ran: list[str] = []
        self._stub = stub
        self._spread = spread
        self._stop_at = stop_at

    def __call__(self, settings: Options, text: str) -> Run:
        assert is_running(self._stub.pid())
        if len(self.ran) == self._stop_at:
            raise KeyboardInterrupt
        self.ran.append(settings.output.label)
        flags = dict(pair.split("=") for pair in settings.output.label.split(", "))
        seconds = 0.1 * abs(int(flags["seqs"]) - 4) + 0.01 * int(flags.get("tokens", 1))
        report = report_of(settings, [answered(0, 0.0, 0.0, seconds)])
        spread = Interval(1e3 * (seconds - self._spread), 1e3 * (seconds + self._spread))
        return Run(replace(report, intervals={"e2e_ms.p50": spread}), 1.0)


def tuned(stub: Stub, bench: Bench, *params: str, **settings: object) -> TuneReport:
    tune = TuneOptions(param=params, objective="e2e_p50", ready="", stop_timeout=20, **settings)  # type: ignore[arg-type]
    base = Base(stub.command, ["penstock", "serve", "my model"], stub.url)
    return Tuner(tune, chosen(), base, bench).run()


def test_the_best_of_all_combinations(stub: Stub, tmp_path: Path) -> None:
    bench = Bench(stub, spread=0.005)
    study = tuned(stub, bench, "seqs=2,4", "tokens=1,2")
    assert bench.ran == ["seqs=2, tokens=1", "seqs=2, tokens=2", "seqs=4, tokens=1", "seqs=4, tokens=2"]
    assert study.best == 2
    assert study.like_best == [3]  # 10 and 20 ms, each with 5 on both sides
    assert study.best_command == "penstock serve 'my model' --seqs=4 --tokens=1"
    assert not is_running(stub.pid())
    text = tmp_path / "text"
    write_study(
        study,
        tuning_findings,
        OutputOptions(markdown=str(text), html=str(tmp_path / "page"), csv=str(tmp_path / "csv")),
    )
    assert study.best_command in text.read_text()
    assert "seqs 4, tokens 2" in text.read_text()
    assert len((tmp_path / "csv").read_text().splitlines()) == 5


def test_quick_leaves_some_out(stub: Stub) -> None:
    bench = Bench(stub)
    study = tuned(stub, bench, "seqs=1,2,3,4", "tokens=1,2,3", strategy="quick")
    assert study.best is not None
    assert study.tried[study.best].settings == {"seqs": "4", "tokens": "1"}
    assert len(bench.ran) == 6


def test_a_server_that_does_not_start_is_no_end(stub: Stub) -> None:
    study = tuned(stub, Bench(stub), "seqs=2,4", "fail=1,0")
    assert ["no such model" in tried.problem for tried in study.tried] == [True, False, True, False]
    assert study.best == 3
    assert "no such model" in " ".join(map(str, tuning_findings(study).table[1]))


def test_none_starts(stub: Stub) -> None:
    with pytest.raises(LoadTestError, match=r"no server could be measured.*no such model"):
        tuned(stub, Bench(stub), "fail=1")


def test_nothing_keeps_the_bounds(stub: Stub) -> None:
    study = tuned(stub, Bench(stub), "seqs=1,4", slo=("e2e_p99:5",))
    assert study.best is None
    assert study.best_command == ""
    assert all(tried.misses for tried in study.tried)
    assert "Nothing that was tried" in tuning_findings(study).answer[0]


def test_interrupted_there_is_a_report_of_what_was_tried(stub: Stub) -> None:
    study = tuned(stub, Bench(stub, stop_at=2), "seqs=1,2,4")
    assert [tried.settings["seqs"] for tried in study.tried] == ["1", "2"]
    assert study.ended_early == "by the user"
    assert not is_running(stub.pid())
    with pytest.raises(KeyboardInterrupt):
        tuned(stub, Bench(stub, stop_at=0), "seqs=1,2,4")


def test_each_server_is_another_process(stub: Stub) -> None:
    pids = []

    def bench(settings: Options, text: str) -> Run:
        pids.append(stub.pid())
        os.kill(pids[-1], 0)
        return Run(report_of(settings, [answered(0, 0.0, 0.0, 0.1)]), 1.0)

    tune = TuneOptions(param=("seqs=1,2",), objective="e2e_p50", ready="")
    Tuner(tune, chosen(), Base(stub.command, [], stub.url), bench).run()
    assert len(set(pids)) == 2
