"""The process border: an engine process that loads, dies, hangs or cannot be loaded, as its streams see it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable
from io import FileIO
from pathlib import Path
from typing import NoReturn

import pytest
import zmq

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AddRequest,
    FinishReason,
    Heartbeat,
    RequestOutput,
    SamplingParams,
    StepRecord,
)
from penstock.engines.errors import EngineError, NotReadyError
from penstock.engines.process import wire
from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.link import EngineLink
from penstock.engines.process.liveness import WatchdogConfig
from penstock.engines.registry import EngineSpec
from support.processes import is_running, listening_ports

SLOW = {"latency": {"per_step": 0.02}}
MARKER = 7


def spec(**options: object) -> EngineSpec:
    return EngineSpec(runner="simulated", options={"num_blocks": 8192, "first_token_id": 100, **options})


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., object]]:
    engines: list[ProcessEngine] = []

    async def _start(watchdog: WatchdogConfig | None = None, **options: object) -> ProcessEngine:
        engine = ProcessEngine(spec(**options), watchdog)
        engines.append(engine)
        await engine.start()
        return engine

    yield _start
    for engine in engines:
        await engine.stop()


def submit(engine: ProcessEngine, *, prompt: list[int] | None = None, max_tokens: int = 8, n: int = 1) -> RequestStream:
    add = AddRequest(
        engine.new_ids(n), prompt or [1, 2, 3], SamplingParams(max_tokens=max_tokens), arrival_time=time.monotonic()
    )
    return engine.submit([add])


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for outputs in stream for output in outputs]


def ends(outputs: list[RequestOutput]) -> list[tuple[FinishReason, str | None]]:
    return [(o.finish_reason, o.error.code if o.error else None) for o in outputs if o.finish_reason is not None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_request_runs_to_its_end(start):
    engine = await start()
    outputs = await collect(submit(engine, max_tokens=8, n=2))
    assert ends(outputs) == [(FinishReason.LENGTH, None)] * 2
    assert sum(len(o.token_ids) for o in outputs) == 16


async def test_what_is_free_is_known_from_the_start(start):
    engine = await start()
    assert engine.stats.num_free_blocks == engine.stats.num_blocks == engine.info.num_blocks


async def test_kill_9_ends_every_stream_with_one_error_and_the_engine_comes_back(start):
    engine = await start(**SLOW)
    streams = [submit(engine, max_tokens=6_000) for _ in range(8)]
    await streams[0].__anext__()
    os.kill(engine.pid, signal.SIGKILL)
    for stream in streams:
        assert ends(await collect(stream)) == [(FinishReason.ERROR, "engine_dead")]
    with pytest.raises(NotReadyError):
        submit(engine)
    assert engine.stats == EngineStats()
    await until(lambda: engine.ready)
    assert engine.num_restarts == 1
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


@pytest.fixture
def at_start(tmp_path, monkeypatch):
    """Code that each engine process runs first, in Python's start-up hook."""

    def _at_start(code: str) -> None:
        hook = f"import os, subprocess, sys\nif 'penstock.engines.process.worker' in sys.orig_argv:\n    {code}\n"
        (tmp_path / "sitecustomize.py").write_text(hook)
        paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return _at_start


async def test_what_an_engine_process_has_started_ends_with_it(at_start, start, tmp_path):
    ids = tmp_path / "ids"
    at_start(f"print(subprocess.Popen(['sleep', '600']).pid, file=open({str(ids)!r}, 'a'))")
    engine = await start()
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.num_restarts == 1 and engine.ready)
    first, second = map(int, ids.read_text().split())
    assert not is_running(first)
    assert is_running(second)
    await engine.stop()
    await until(lambda: not is_running(second))


async def test_a_process_that_is_killed_while_it_loads_may_have_lacked_memory(at_start, start):
    at_start("os.kill(os.getpid(), 9)")
    with pytest.raises(EngineError, match=r"while it loaded the model \(killed, as .* memory runs out\)"):
        await start()


async def test_nobody_waits_for_a_process_that_has_just_died(start):
    engine = await start()
    socket = engine._link._socket._socket
    os.kill(engine.pid, signal.SIGKILL)
    while socket.poll(0, zmq.POLLOUT):  # the socket knows before the event loop does, which stands still meanwhile
        pass
    assert ends(await collect(submit(engine))) == [(FinishReason.ERROR, "engine_dead")]


async def test_a_stopped_process_ends_by_itself_whatever_it_computes(start):
    engine = await start(**SLOW)
    process = engine._process
    stream = submit(engine, max_tokens=6_000)
    await stream.__anext__()
    await engine.stop()
    assert process.returncode == 0, "it was killed"
    assert ends(await collect(stream)) == [(FinishReason.ERROR, "engine_dead")]


async def test_an_adapter_whose_files_have_gone_does_not_keep_a_stopped_engine_from_starting(start, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    engine = await start(max_loras=1, adapters={"a": str(folder)})
    await engine.stop()
    (folder / "adapter_config.json").unlink()
    await engine.start()
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]


async def test_a_hung_process_is_replaced_within_the_watchdog_time(start):
    engine = await start(WatchdogConfig(timeout=1.5, ready_timeout=0.5), **SLOW, faults=f"hang={MARKER}")
    stream = submit(engine, prompt=[1, MARKER, 2])
    await until(lambda: not engine.ready)
    assert ends(await collect(stream)) == [(FinishReason.ERROR, "engine_dead")]
    await until(lambda: engine.ready)
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]


async def test_a_process_that_cannot_be_started_is_an_engine_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    engine = ProcessEngine(spec())
    with pytest.raises(EngineError, match="cannot be started"):
        await engine.start()
    await engine.stop()


async def test_a_folder_too_deep_for_a_socket_is_an_engine_error(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    engine = ProcessEngine(spec())
    with pytest.raises(EngineError, match="no socket"):
        await engine.start()
    await engine.stop()
    assert not list(deep.iterdir())


async def test_without_a_free_descriptor_there_is_an_engine_error(monkeypatch):
    def none_left() -> NoReturn:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("penstock.engines.process.link.pair_socket", none_left)
    engine = ProcessEngine(spec())
    with pytest.raises(EngineError, match="no socket can be created: Too many open files"):
        await engine.start()
    await engine.stop()


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), RuntimeError("nobody expects it")])
async def test_a_restart_that_fails_is_logged_and_tried_again(error, start, monkeypatch, caplog):
    engine = await start()
    failures = [error]

    def pair_socket() -> wire.Socket:
        if failures:
            raise failures.pop()
        return wire.pair_socket()

    monkeypatch.setattr("penstock.engines.process.link.pair_socket", pair_socket)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.num_restarts == 2 and engine.ready)
    assert "the engine could not be restarted" in caplog.text
    assert caplog.text.count("the engine is dead") == 1, "it has not died again"
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]


async def test_what_the_system_refuses_is_no_death_of_the_engine(start, monkeypatch):
    engine = await start(WatchdogConfig(max_restarts=1))
    failures = [zmq.ZMQError(errno.EMFILE)] * 3

    def pair_socket() -> wire.Socket:
        if failures:
            raise failures.pop()
        return wire.pair_socket()

    monkeypatch.setattr("penstock.engines.process.link.pair_socket", pair_socket)
    monkeypatch.setattr("penstock.engines.process.client._BACKOFF", 0.01)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.ready and not failures)
    assert not engine.failed


async def test_an_idle_engine_stays_ready_by_its_heart_beats(start):
    engine = await start(WatchdogConfig(timeout=3.0, ready_timeout=2.5))
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]
    deadline = time.monotonic() + 4
    await until(lambda: time.monotonic() > deadline)
    assert engine.ready
    assert engine.num_restarts == 0


async def test_an_engine_that_dies_too_often_stays_down_and_says_so(start):
    engine = await start(WatchdogConfig(max_restarts=1))
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.num_restarts == 1 and engine.ready)
    assert not engine.failed
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.failed)
    assert not engine.ready
    with pytest.raises(NotReadyError, match="stays down"):
        submit(engine)


async def test_a_step_that_raises_fails_its_requests_only(start):
    engine = await start(**SLOW, faults=f"raise={MARKER}")
    assert ends(await collect(submit(engine, prompt=[MARKER]))) == [(FinishReason.ERROR, "step_failed")]
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]
    assert engine.num_restarts == 0


async def test_steps_that_fail_in_a_row_bring_a_new_process(start):
    engine = await start(faults=f"raise={MARKER}")
    for _ in range(3):
        await collect(submit(engine, prompt=[MARKER]))
    await until(lambda: engine.num_restarts == 1 and engine.ready)


async def test_nan_fails_one_request_and_leaves_its_neighbour_alone(start):
    engine = await start(**SLOW, faults=f"nan={MARKER}")
    good, bad = submit(engine, max_tokens=20), submit(engine, prompt=[MARKER])
    assert ends(await collect(bad)) == [(FinishReason.ERROR, "numerical_error")]
    assert ends(await collect(good)) == [(FinishReason.LENGTH, None)]


async def test_a_model_that_cannot_be_loaded_says_why():
    engine = ProcessEngine(
        EngineSpec(runner="openvino", options={"model_dir": "/nonexistent", "kv_cache_memory": None})
    )
    with pytest.raises(EngineError, match="nonexistent"):
        await engine.start()
    await engine.stop()


async def test_closing_a_stream_frees_its_blocks(start):
    engine = await start(**SLOW)
    async with submit(engine, max_tokens=6_000, n=3) as stream:
        await stream.__anext__()
    await until(lambda: engine.stats.finished.get("abort") == 3)
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    assert engine.stats.num_running == engine.stats.num_waiting == 0


async def test_every_step_is_seen_by_the_observer():
    seen: list[StepRecord] = []
    engine = ProcessEngine(spec(), on_step=seen.append)
    await engine.start()
    await collect(submit(engine, max_tokens=5))
    await engine.stop()
    assert [step.num_tokens for step in seen] == [3, 1, 1, 1, 1]


async def test_the_socket_lies_in_a_folder_of_this_user_alone(start, monkeypatch, tmp_path):
    modes: list[int] = []

    def link(address: str, heartbeats: FileIO, on_beat: Callable[[Heartbeat], None]) -> EngineLink:
        [folder] = tmp_path.iterdir()
        assert address.startswith(f"ipc://{folder}/")
        modes.append(stat.S_IMODE(folder.stat().st_mode))
        return EngineLink(address, heartbeats, on_beat)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("penstock.engines.process.client.EngineLink", link)
    await start()
    assert modes == [0o700]
    assert not list(tmp_path.iterdir()), "it is gone with the need for it, however this process ends"


async def test_without_a_place_for_the_folder_there_is_an_engine_error(start, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(EngineError, match=r"cannot be started: .*No such file"):
        await start()


async def test_an_engine_process_listens_on_no_network_port(start):
    engine = await start()
    assert listening_ports(engine.pid) == []


async def test_the_process_ends_with_the_gateway(start):
    engine = await start()
    process = engine.pid
    await engine.stop()
    assert not Path(f"/proc/{process}").exists()
