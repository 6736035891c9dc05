"""Whole load tests, with processes of their own, against the reference server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.calibrate import Calibration, calibrate
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Sample
from penstock.loadtest.mock.options import MockOptions, Schedule
from penstock.loadtest.mock.server import Mock
from penstock.loadtest.options import Options, options
from penstock.loadtest.report.describe import what_was_run
from penstock.loadtest.run import LoadTest, processes

COMMAND = (sys.executable, "-m", "penstock.gateway.cli", "loadtest")
HOURS = 1e7
"""Milliseconds that nobody waits for."""


class Onlooker:
    """Calls `then` once so many samples have been seen."""

    def __init__(self, after: int = 0) -> None:
        self.samples: list[Sample] = []
        self.notes: list[str] = []
        self.reached = asyncio.Event()
        self._after = after

    def update(self, samples: Sequence[Sample], in_flight: int) -> None:
        self.samples += samples
        if len(self.samples) >= self._after:
            self.reached.set()

    def note(self, text: str) -> None:
        self.notes.append(text)


@asynccontextmanager
async def mock(**settings: Any) -> AsyncIterator[Mock]:
    async with Mock(MockOptions(port=0, **{"ttft_ms": 5, "itl_ms": 2} | settings)) as server:
        yield server


def chosen(server: Mock, **settings: Any) -> Options:
    plain = {"model": "mock", "output_tokens": 8, "prompt_tokens": 16, "calibrate": False, "warmup": 0}
    return options({"url": f"http://127.0.0.1:{server.port}"} | plain | settings)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_its_figures_are_the_truth() -> None:
    async with mock(ttft_ms=100, itl_ms=10) as server:
        report = await LoadTest(chosen(server, requests=24, concurrency=6, output_tokens=20), Onlooker()).run()
        truth = server.truth.summary()
    assert (report.completed, report.errors, report.output_tokens) == (24, {}, 480)
    for name, floor in (("ttft_ms", 100), ("e2e_ms", 290)):
        found, real = getattr(report, name), truth[name]
        assert found is not None
        assert found.count == 24
        # what a client sees is never before it happens, and not long after
        assert floor - 0.1 < real["mean"] < found.mean < real["mean"] * 2
    assert report.itl_ms is not None
    assert report.itl_ms.count == truth["itl_ms"]["count"] == 24 * 19
    assert report.itl_ms.mean == pytest.approx(truth["itl_ms"]["mean"], rel=0.3)
    assert report.tpot_ms is not None
    assert report.tpot_ms.mean == pytest.approx(truth["tpot_ms"]["mean"], rel=0.3)
    assert report.validity.pieces_per_read >= 1
    assert report.timeline is not None
    assert not report.interrupted_by_user


async def test_several_processes_share_one_workload() -> None:
    onlooker = Onlooker()
    async with mock() as server:
        test = LoadTest(chosen(server, requests=40, concurrency=5, processes=3, repeat=3, warmup=1), onlooker)
        report = await test.run()
        assert len(server.truth.records) == 3 * (40 + 1)
    assert (report.completed, report.validity.processes, len(report.runs)) == (40, 3, 3)
    assert sorted(sample.index for sample in test.samples) == list(range(40))
    assert len(onlooker.samples) == 120
    assert report.intervals["ttft_ms.p50"].low <= report.intervals["ttft_ms.p50"].high
    assert onlooker.notes == ["run 1 of 3", "run 2 of 3", "run 3 of 3"]


async def test_pauses_show_in_an_open_loop_from_the_intended_times() -> None:
    """One place, and a server that stops for 0.6 of each 1.2 s: what waited for it was sent late, not answered late."""
    async with mock(ttft_ms=1, itl_ms=0, pause_every_ms=1200, pause_ms=600) as server:
        settings = {"rate": 50, "arrival": "constant", "requests": 100, "max_in_flight": 1, "output_tokens": 1}
        test = LoadTest(chosen(server, **settings), Onlooker())
        report = await test.run()
    from_intended = sum(sample.ended - sample.intended > 0.2 for sample in test.samples)
    from_send = sum(sample.ended - sample.sent > 0.2 for sample in test.samples)
    assert report.latency_from == "intended"
    assert from_intended >= 20
    assert 1 <= from_send <= from_intended / 5
    assert report.validity.verdict == "invalid", "the open loop was none"
    assert any("--max-in-flight" in reason for reason in report.validity.reasons)


async def test_interrupted_once_what_runs_is_waited_for() -> None:
    onlooker = Onlooker(after=8)
    async with mock() as server:
        test = LoadTest(chosen(server, concurrency=8, requests=1_000_000), onlooker)
        run = asyncio.create_task(test.run())
        await onlooker.reached.wait()
        test.interrupt()
        report = await run
        answered = len(server.truth.records)
    assert report.interrupted_by_user
    assert report.interrupted == 0
    assert report.errors == {}
    assert 8 <= report.completed == answered


@pytest.mark.parametrize("times", [2, 3])
async def test_interrupted_twice_what_runs_is_cut_off(times: int) -> None:
    """The first answers come, the last eight never would."""
    onlooker = Onlooker(after=8)
    async with mock() as server:
        test = LoadTest(chosen(server, concurrency=8, duration=3600, grace=3600), onlooker)
        run = asyncio.create_task(test.run())
        await onlooker.reached.wait()
        server.schedule = Schedule(MockOptions(ttft_ms=HOURS), 0.0)
        await until(lambda: server.in_flight == 8)
        for _ in range(times):
            test.interrupt()
        report = await run
    assert report.interrupted_by_user
    assert report.completed >= 8
    assert report.errors == {}
    if times == 2:
        assert report.interrupted == 8


async def test_an_interrupted_repeat_does_not_count() -> None:
    async with mock() as server:
        onlooker = Onlooker(after=24)
        test = LoadTest(chosen(server, requests=20, repeat=3), onlooker)
        run = asyncio.create_task(test.run())
        await onlooker.reached.wait()
        test.interrupt()
        report = await run
    assert report.interrupted_by_user
    assert [figures.completed for figures in report.runs] == [20]


@pytest.mark.parametrize(("warmup", "calibrate"), [(0, False), (1, False), (1, True)])
async def test_interrupted_before_anything_was_measured(warmup: int, calibrate: bool) -> None:
    """A server that never answers does not keep anybody."""
    async with mock(ttft_ms=HOURS) as server:
        onlooker = Onlooker()
        test = LoadTest(chosen(server, warmup=warmup, model="", calibrate=calibrate), onlooker)
        run = asyncio.create_task(test.run())
        await until(lambda: test._task is not None)
        if warmup and not calibrate:
            await until(lambda: server.in_flight)
            await until(lambda: test._fleet is not None)
        test.interrupt()
        with pytest.raises(LoadTestError, match="before anything was measured"):
            await run
        assert not any("waiting" in note for note in onlooker.notes)
        await until(lambda: not server.connections)


async def test_a_client_process_that_dies_is_told() -> None:
    onlooker = Onlooker(after=8)
    async with mock() as server:
        test = LoadTest(chosen(server, duration=2.0, processes=2, concurrency=8), onlooker)
        run = asyncio.create_task(test.run())
        await onlooker.reached.wait()
        assert test._fleet is not None
        os.kill(test._fleet.pids[0], signal.SIGKILL)
        report = await run
    assert report.completed >= 8
    assert (report.validity.verdict, report.validity.lost_processes) == ("invalid", 1)
    assert "1 of the client processes died" in " ".join(report.validity.reasons)


async def test_client_processes_end_with_the_command() -> None:
    async with mock(ttft_ms=HOURS) as server:
        flags = ("--url", f"http://127.0.0.1:{server.port}", "--model", "mock", "--warmup", "0", "--no-calibrate")
        command = await asyncio.create_subprocess_exec(*COMMAND, *flags, "--no-live", stdin=subprocess.DEVNULL)
        await until(lambda: len(server.connections) >= 8)
        command.kill()
        await command.wait()
        await until(lambda: not server.connections)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_leaves_a_report(name: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with mock() as server:
        flags = ("--url", f"http://127.0.0.1:{server.port}", "--duration", "3600", "--output-tokens", "4")
        command = await asyncio.create_subprocess_exec(
            *COMMAND, *flags, "--json", str(out), "--no-live", "--no-calibrate", start_new_session=True
        )
        await until(lambda: len(server.truth.records) > 20)
        os.killpg(command.pid, name)  # as a terminal does: to all of them
        assert await command.wait() == 130
        answered = len(server.truth.records)
    report = json.loads(out.read_text())
    assert report["interrupted_by_user"] is True
    assert (report["completed"], report["errors"]) == (answered - 2, {})  # two were for warming up
    assert report["environment"]["cores"] >= 1


async def test_whole_answers_have_no_first_token() -> None:
    async with mock() as server:
        report = await LoadTest(chosen(server, stream=False, requests=4, output_tokens=5), Onlooker()).run()
    assert (report.completed, report.output_tokens) == (4, 20)
    assert (report.ttft_ms, report.itl_ms, report.tpot_ms) == (None, None, None)
    assert report.e2e_ms is not None
    assert report.timeline is not None
    assert sum(report.timeline.output_tokens_per_s) * report.timeline.seconds == pytest.approx(20)
    assert dict(what_was_run(report))["Protocol"] == "openai-chat, not streamed"


async def test_what_cannot_be_is_an_error() -> None:
    async with mock() as server:
        gone = chosen(server, warmup=1)
        with pytest.raises(LoadTestError, match="token-ids"):
            await LoadTest(chosen(server, token_ids=True), Onlooker()).run()
        with pytest.raises(LoadTestError, match="goodput"):
            await LoadTest(chosen(server, goodput=("speed:1",)), Onlooker()).run()
        with pytest.raises(LoadTestError, match="concurrency: an open loop"):
            await LoadTest(chosen(server, rate=1, concurrency=3), Onlooker()).run()
        assert not server.truth.records
    with pytest.raises(LoadTestError, match="no answer from"):
        await LoadTest(gone, Onlooker()).run()


async def test_a_server_in_a_process_of_its_own_is_watched() -> None:
    settings = json.dumps({"port": 0, "ttft_ms": 1.0, "itl_ms": 2.0})
    command = (sys.executable, "-m", "penstock.loadtest.mock", settings)
    server = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdin is not None
    url = (await server.stdout.readline()).decode().split()[2].rstrip(",")
    plain = {"url": url, "model": "mock", "duration": 1.5, "concurrency": 16, "calibrate": False}
    report = await LoadTest(options(plain), Onlooker()).run()
    server.stdin.close()
    assert await server.wait() == 0, "it ends with the process that started it"
    assert report.server is not None
    assert report.server.cores is not None
    assert report.server.cores > 0
    assert min(report.server.metrics["process_rss_bytes"]) > 0
    assert len(report.server.seconds) >= 1
    assert report.environment["other_cores"] >= 0


@pytest.mark.parametrize(
    ("settings", "floors"),
    [
        ({}, {"ttft", "itl"}),
        ({"protocol": "openai-completions"}, {"ttft", "itl"}),
        ({"protocol": "kserve-generate"}, {"ttft", "itl"}),
        ({"stream": False}, {"e2e"}),
        ({"protocol": "kserve-http"}, {"e2e"}),
    ],
)
async def test_calibration_finds_the_floors_of_what_the_protocol_shows(
    settings: dict[str, Any], floors: set[str]
) -> None:
    found = await calibrate(options({"url": "http://192.0.2.1", "model": "m"} | settings))
    assert set(found.floor_ms) == floors
    assert all(0 <= value < 1000 for value in found.floor_ms.values())
    assert (found.tokens_per_s > 1000) == ("ttft" in floors)
    spoken = settings.get("protocol", "openai-chat")
    assert found.protocol == ("openai-chat" if spoken == "kserve-http" else spoken)


async def test_reports_say_what_calibration_found() -> None:
    async with mock() as server:
        report = await LoadTest(chosen(server, requests=4, calibrate=True), Onlooker()).run()
        assert len(server.truth.records) == 4
    assert set(report.validity.floor_ms) == {"ttft", "itl"}
    assert report.validity.ceiling_tokens_per_s > 0
    assert 0 < report.validity.ceiling_share < 1


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"concurrency": 8}, 1),
        ({"concurrency": 800}, 4),
        ({"concurrency": 100_000}, 16),
        ({"concurrency": 100_000, "url": "http://127.0.0.1"}, 8),
        ({"concurrency": 100_000, "processes": 3}, 3),
        ({"concurrency": 2, "processes": 3}, 2),
        ({"rate": 100, "output_tokens": 100}, 1),
        ({"rate": 100, "output_tokens": 1000}, 3),
        ({"rate": 5000, "output_tokens": 1}, 5),
        ({"rate": 5000, "max_in_flight": 2}, 2),
    ],
)
def test_how_many_processes_a_load_gets(settings: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loadtest.run.usable_cores", lambda: 16)
    measured = Calibration(protocol="openai-chat", floor_ms={}, tokens_per_s=80_000.0)
    assert processes(options({"url": "http://192.0.2.1"} | settings), measured) == number
