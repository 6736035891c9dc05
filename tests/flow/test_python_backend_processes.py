"""What happens when a model's process dies, hangs on its way up, or outlives its server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import reports_ready
from penstock.classic.python import instance as instance_module
from penstock.classic.python.link import StubLink
from penstock.classic.python.process import PythonOptions
from penstock.classic.python.session import ModelProgram, Session
from penstock.classic.signature import ModelSignature
from penstock.engines.errors import EngineDeadError, EngineError, NotReadyError, PenstockError
from penstock.engines.host.crash_folder import crashes
from penstock.gateway.requests.call import current_request, name_request
from support.processes import is_running
from support.python_backend import (
    ADD_SUB,
    ADD_SUB_CONFIG,
    CPU,
    FakeHost,
    instances,
    loaded,
    outputs,
    parsed,
    request,
)

CONFIG = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [ 1 ] }} ]
{CPU}
"""
DEADLY = """
import os, signal, time
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            match r.inputs()[0].as_numpy()[0]:
                case b"exit": os._exit(3)
                case b"kill": os.kill(os.getpid(), signal.SIGKILL)
                case b"segv": os.kill(os.getpid(), signal.SIGSEGV)
                case b"wait": time.sleep(1000)
        y = np.array([str(os.getpid())], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]) for r in requests]
"""


def word(text: str) -> np.ndarray:
    found = np.empty(1, np.object_)
    found[0] = text.encode()
    return found


async def until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it has not come true"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["exit", "kill", "segv"])
async def test_a_dying_process_fails_its_requests_and_comes_back(tmp_path: Path, how: str) -> None:
    async with loaded(tmp_path, DEADLY, CONFIG) as model:
        [instance] = instances(model)
        first = instance.pid
        with pytest.raises(EngineDeadError) as caught:
            await model.infer(request(X=word(how)))
        assert caught.value.message == "Stub process 'm_0_0' is not healthy."
        assert not model.ready
        response = await model.infer(request(X=word("")))  # waits for the new process
        assert int(outputs(response)["Y"][0]) == instance.pid != first
        assert model.ready


async def test_what_a_model_logs_is_not_of_the_request_that_has_loaded_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Report server#5279: whose line is it?"""
    caplog.set_level(logging.INFO)
    current_request.set("load")
    extra = """
    def initialize(self, args):
        print("printed")
        pb_utils.Logger.log_info("logged")
    """
    with caplog.filtering(name_request):
        async with loaded(tmp_path, DEADLY + extra, CONFIG) as model:
            with pytest.raises(EngineDeadError):
                await model.infer(request(X=word("kill")))
            await model.infer(request(X=word("")))  # waits for the new process
        logging.getLogger("penstock").info("of the request")
    lines = {record.message: record.request for record in caplog.records if record.name.startswith("penstock")}  # type: ignore[attr-defined]
    assert lines.pop("of the request") == " (request load)"
    assert {"printed", "logged", "m_0_0 has been restarted"} <= lines.keys()
    assert set(lines.values()) == {""}


async def test_a_dying_process_leaves_evidence(tmp_path: Path) -> None:
    folder = tmp_path / "crashes"
    async with loaded(tmp_path, DEADLY, CONFIG, options={"crash-dir": str(folder)}) as model:
        for how in ("kill", "segv"):
            with pytest.raises(EngineDeadError):
                await model.infer(request(X=word(how)))
            await model.infer(request(X=word("")))  # waits for the new process
        await until(lambda: folder.is_dir() and len(crashes(folder)) == 2)
    reports = {}
    for place in crashes(folder):
        report = json.loads((place / "report.json").read_text())
        reports[report["signal"]] = (place / "stacks.txt").read_text()
        assert (report["kind"], report["name"]) == ("model", "m_0_0")
        assert report["settings"]["args"]["model_version"] == "1"
    assert reports["SIGKILL"] == ""
    assert "in execute" in reports["SIGSEGV"]


async def test_a_process_that_dies_while_it_loads_leaves_evidence(tmp_path: Path) -> None:
    folder = tmp_path / "crashes"
    code = "import ctypes\nctypes.string_at(0)"
    with pytest.raises(EngineError, match=r"ended while it loaded the model \(SIGSEGV\)"):
        async with loaded(tmp_path, code, CONFIG, options={"crash-dir": str(folder)}):
            pass
    await until(lambda: folder.is_dir() and len(crashes(folder)) == 1)
    [place] = crashes(folder)
    assert "model.py" in (place / "stacks.txt").read_text()


async def test_killed_under_load(tmp_path: Path) -> None:
    """Every request ends, with an answer or the one error, and afterwards all is as before."""
    async with loaded(tmp_path, ADD_SUB) as model:
        [instance] = instances(model)
        one = np.ones((1, 16), np.float32)

        async def ask() -> str:
            try:
                return str(outputs(await model.infer(request(INPUT0=one, INPUT1=one)))["OUTPUT0"][0, 0])
            except EngineDeadError as error:
                return error.message

        found: set[str] = set()
        for _ in range(3):
            calls = [asyncio.create_task(ask()) for _ in range(300)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            os.kill(instance.pid, signal.SIGKILL)
            found.update(await asyncio.wait_for(asyncio.gather(*calls), 30))
            await until(lambda: model.ready)
        assert found == {"2.0", "Stub process 'm_0_0' is not healthy."}
        assert await ask() == "2.0"


async def test_its_children_die_with_it(tmp_path: Path) -> None:
    code = """
import os, subprocess
class TritonPythonModel:
    def execute(self, requests):
        child = subprocess.Popen(["sleep", "1000"])
        y = np.array([str(child.pid)], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])]
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        child = int(outputs(await model.infer(request(X=word(""))))["Y"][0])
        [instance] = instances(model)
        os.kill(instance.pid, signal.SIGKILL)
        await until(lambda: not is_running(child))
        await until(lambda: model.ready)


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "_MAX_DELAY", 0.01)


@pytest.mark.usefixtures("no_delays")
async def test_it_stays_down_when_it_cannot_be_started_again(tmp_path: Path) -> None:
    async with loaded(tmp_path, DEADLY, CONFIG) as model:
        (tmp_path / "m" / "1" / "model.py").write_text("raise RuntimeError('the disk is gone')")
        with pytest.raises(EngineDeadError):
            await model.infer(request(X=word("kill")))
        with pytest.raises(PenstockError, match="Stub process 'm_0_0' is not healthy: RuntimeError: the disk is gone"):
            await asyncio.wait_for(model.infer(request(X=word(""))), 60)
        assert not model.ready


@pytest.mark.usefixtures("no_delays")
async def test_a_start_that_fails_is_not_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request that comes between two starts waits for the next one: it must not end the model."""
    async with loaded(tmp_path, DEADLY, CONFIG) as model:
        file = tmp_path / "m" / "1" / "model.py"
        good = file.read_text()
        file.write_text("raise RuntimeError('not yet')")
        with pytest.raises(EngineDeadError):
            await model.infer(request(X=word("kill")))
        await until(lambda: "could not be restarted" in caplog.text)
        asked = asyncio.create_task(model.infer(request(X=word(""))))
        await asyncio.sleep(0)
        file.write_text(good)
        [instance] = instances(model)
        assert int(outputs(await asyncio.wait_for(asked, 60))["Y"][0]) == instance.pid
        assert model.ready


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = (", "SyntaxError: "),
        ("pass", "TypeError: model.py has no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "Python model model.py does not implement `execute` method."),
        (
            "class TritonPythonModel:\n    execute = 1\n    def initialize(self, args): raise OSError(2, 'no file')",
            "FileNotFoundError: [Errno 2] no file",
        ),
        (
            "class TritonPythonModel:\n    execute = 1\n    def initialize(self, args): import os; os._exit(7)",
            "Stub process 'm_0_0' ended while it loaded the model (status 7)",
        ),
    ],
)
async def test_models_that_do_not_load(tmp_path: Path, code: str, text: str) -> None:
    with pytest.raises(EngineError) as caught:
        async with loaded(tmp_path, code, CONFIG):
            pass
    assert text in caught.value.message
    assert str(tmp_path) not in caught.value.message


def mapped(pid: int | str) -> list[str]:
    """Files that are mapped as shared memory, as /proc names them."""
    with open(f"/proc/{pid}/maps") as file:
        return [line.split(None, 5)[5].strip() for line in file if line.split()[1][3] == "s"]


async def test_nothing_is_left(tmp_path: Path) -> None:
    """The shared memory has no name in any file system, so even kill -9 leaves nothing; no descriptors stay open."""

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = files()
    large = np.ones((1, 100_000), np.float32)
    config = ADD_SUB_CONFIG.replace("16", "-1")
    async with loaded(tmp_path, ADD_SUB, config, options={"shm-region-prefix-name": "mine"}) as model:
        pid = instances(model)[0].pid
        await model.infer(request(INPUT0=large, INPUT1=large))
        names = {name for name in mapped(pid) + mapped("self") if "mine" in name}
        assert names == {"/memfd:mine-down (deleted)", "/memfd:mine-up (deleted)"}
        assert not any("/dev/shm" in name for name in mapped(pid))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not model.ready)
        await until(lambda: model.ready)
        second = instances(model)[0].pid
    assert not is_running(pid)
    assert not is_running(second)
    await until(lambda: files() <= before + 1)  # the loop's own socket for child processes may stay
    gc.collect()
    assert not any("mine" in name for name in mapped("self"))


async def test_unloading_waits_for_what_runs(tmp_path: Path) -> None:
    code = f"""
import time
class TritonPythonModel:
    def execute(self, requests):
        open({str(tmp_path / "begun")!r}, "w").close()
        time.sleep(0.3)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([b"done"], np.object_))])]
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        call = asyncio.create_task(model.infer(request(X=word(""))))
        await until((tmp_path / "begun").exists)
    assert outputs(await call)["Y"].tolist() == [b"done"]


async def test_a_model_that_does_not_finish_is_killed(tmp_path: Path) -> None:
    code = """
import time
class TritonPythonModel:
    def execute(self, requests): pass
    def finalize(self): time.sleep(1000)
"""
    async with loaded(tmp_path, code, CONFIG, options={"stub-timeout-seconds": "3"}) as model:
        pid = instances(model)[0].pid
    assert not is_running(pid)


@pytest.mark.parametrize("together", [False, True])
async def test_a_model_that_hangs_ends_with_the_stop_that_is_given_up(tmp_path: Path, together: bool) -> None:
    """`together`: its driver is cancelled in the same turn of the loop, as when the loop ends."""
    async with loaded(tmp_path, DEADLY, CONFIG, options={"stub-timeout-seconds": "3600"}) as model:
        [instance] = instances(model)
        pid = instance.pid
        call = asyncio.create_task(model.infer(request(X=word("wait"))))
        await until(lambda: bool(instance._session._open))
        stopping = asyncio.create_task(model.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        if together:
            model._instances[0]._driver.cancel()  # type: ignore[attr-defined]
        with pytest.raises(NotReadyError):
            await call
        await until(lambda: not is_running(pid))


async def test_a_stop_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    async with loaded(tmp_path, DEADLY, CONFIG) as model:
        [instance] = instances(model)
        request_task = asyncio.create_task(model.infer(request(X=word("wait"))))
        await until(lambda: bool(instance._session._open))
        unloading = asyncio.create_task(instance.unload())
        pid = instance.pid
        await asyncio.sleep(0)
        await until(lambda: instance.pid is None)
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        await until(lambda: not is_running(pid))
        request_task.cancel()
        await asyncio.gather(request_task, return_exceptions=True)


async def test_a_start_is_given_up_whatever_the_process_has_just_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each turn of the loop behind its first message: unloading would wait for ever otherwise."""

    async def connect(*_: Any) -> Any:
        return SimpleNamespace(closed=asyncio.get_running_loop().create_future(), send=lambda *_: None)

    monkeypatch.setattr(StubLink, "connect", connect)
    launch: Any = SimpleNamespace(options=PythonOptions.parse({}))
    program = ModelProgram("m_0", launch, {}, ModelSignature(parsed(ADD_SUB_CONFIG)), FakeHost())
    process: Any = SimpleNamespace(socket=None, files=None)
    for turns in range(8):
        session = Session(program, process)
        loading = asyncio.create_task(session._load())
        await asyncio.sleep(0)
        session._on_message("hello", [], memoryview(b""))
        for _ in range(turns):
            await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait((loading,), timeout=5)
        assert loading.cancelled(), f"after {turns} turns"


async def test_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "_PROBE_INTERVAL", 0.02)
    flag, hangs = tmp_path / "flag", tmp_path / "hangs"
    flag.touch()
    code = f"""
import os, time
class TritonPythonModel:
    async def is_ready(self):
        if os.path.exists({str(hangs)!r}):
            os.unlink({str(hangs)!r})
            time.sleep(1000)
        return os.path.exists({str(flag)!r}) or "not ready"
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([b"y"], np.object_))])]
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        assert reports_ready(model)
        flag.unlink()
        await until(lambda: not reports_ready(model))
        assert outputs(await asyncio.wait_for(model.infer(request(X=word(""))), 20))["Y"].tolist() == [b"y"]
        assert model.ready, "only those are told who ask"
        flag.touch()
        await until(lambda: reports_ready(model))
        hangs.touch()
        await until(lambda: not hangs.exists())
        [instance] = instances(model)
        first = instance.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: instance.pid not in (None, first))
    asking = [task for task in asyncio.all_tasks() if "Session.is_ready" in repr(task.get_coro())]
    assert not asking, "who asked the process that died waits no longer"


def test_it_dies_with_the_server(tmp_path: Path) -> None:
    script = f"""
        import asyncio, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from support.python_backend import ADD_SUB, instances, loaded
        async def main():
            async with loaded(Path({str(tmp_path)!r}), ADD_SUB) as model:
                print(instances(model)[0].pid, flush=True)
                await asyncio.sleep(1000)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_running(pid)
        server.kill()
    end = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(pid)


async def test_several_instances_share_the_load_of_a_dead_one(tmp_path: Path) -> None:
    config = ADD_SUB_CONFIG.replace("kind: KIND_CPU", "kind: KIND_CPU count: 2")
    async with loaded(tmp_path, ADD_SUB, config) as model:
        one = np.ones((1, 16), np.float32)
        os.kill(instances(model)[0].pid, signal.SIGKILL)
        await until(lambda: not instances(model)[0].ready)
        assert model.ready
        with contextlib.suppress(EngineDeadError):
            await model.infer(request(INPUT0=one, INPUT1=one))
        assert outputs(await model.infer(request(INPUT0=one, INPUT1=one)))["OUTPUT0"][0, 0] == 2


@pytest.mark.usefixtures("no_delays")
async def test_killed_while_large_tensors_are_on_their_way(tmp_path: Path) -> None:
    config = ADD_SUB_CONFIG.replace("16", "-1")
    async with loaded(tmp_path, ADD_SUB, config) as model:
        large = np.ones((1, 1_000_000), np.float32)
        for delay in (0.0, 0.002, 0.005, 0.01):
            calls = [asyncio.create_task(model.infer(request(INPUT0=large, INPUT1=large))) for _ in range(4)]
            await asyncio.sleep(delay)
            killed = instances(model)[0].pid
            os.kill(killed, signal.SIGKILL)
            found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
            assert all(isinstance(one, EngineDeadError) or outputs(one)["OUTPUT0"][0, -1] == 2 for one in found)
            await until(lambda killed=killed: model.ready and instances(model)[0].pid not in (None, killed))


async def test_an_unloaded_model_keeps_no_files_open(tmp_path: Path) -> None:
    """Nor until the next full garbage collection, which may be many loads away."""

    async def used() -> None:
        async with loaded(tmp_path, ADD_SUB, ADD_SUB_CONFIG) as model:
            x = np.ones((1, 16), np.float32)
            await model.infer(request(INPUT0=x, INPUT1=x))

    await asyncio.create_task(used())
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        await asyncio.create_task(used())
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()
