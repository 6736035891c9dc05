"""LoRA adapters that come and go while an engine runs: what both cores answer, and what the simulated engine keeps."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.adapter_loading import AdapterLoader, NoAdapters, adapter_loader
from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    DownMessage,
    LoadAdapter,
    RequestOutput,
    SamplingParams,
    UnloadAdapter,
)
from penstock.engines.core import EngineCore
from penstock.engines.errors import InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedBatcher, SimulatedBatcherConfig, SimulatedConfig, SimulatedRunner
from support.adapters import load_adapter

Core = EngineCore | AutonomousCore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[EngineCore, AutonomousCore])
def core(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Core]:
    """Of a simulated engine with room for one adapter."""
    config = SchedulerConfig(max_num_seqs=4)
    core: Core
    if request.param is EngineCore:
        core = EngineCore(SimulatedRunner(SimulatedConfig(max_loras=1)), config, clock)
    else:
        core = AutonomousCore(SimulatedBatcher(SimulatedBatcherConfig(max_loras=1)), config, clock)
    yield core
    core.close()


class Gate:
    """Holds an engine's `prepare_adapter` back, in the thread that calls it."""

    def __init__(self, core: Core, key: str = "") -> None:
        """`key`: only this adapter's."""
        self.begun: list[str] = []
        self._key = key
        self._opened = threading.Semaphore(0)
        host: Any = core.runner if isinstance(core, EngineCore) else core.batcher
        self._prepare, host.prepare_adapter = host.prepare_adapter, self._held

    def _held(self, key: str, folder: Path) -> object:
        self.begun.append(key)
        if self._key in ("", key):
            assert self._opened.acquire(timeout=30)
        return self._prepare(key, folder)

    def open(self) -> None:
        """Lets one load go on."""
        self._opened.release()


def replies(core: Core, *messages: DownMessage, count: int | None = None) -> list[CallReply]:
    """Steps until so many replies have come; one for each message, if not told otherwise."""
    found = core.step(messages).replies
    while len(found) < (len(messages) if count is None else count):
        assert core.has_work or select.select(core.wakeups, [], [], 30)[0], "no reply comes"
        found += core.step([]).replies
        core.check_integrity()
    return found


def ask(ids: tuple[int, ...], adapter: str = "") -> AddRequest:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    return AddRequest(ids, [5, 6, 7], params, arrival_time=float(ids[0]), adapter=adapter)


def ends(core: Core) -> dict[int, str]:
    """Steps while there is anything to do: id -> how it ended."""
    found = {}
    while core.has_work:
        for output in core.step([]).outputs:
            if output.finish_reason is not None:
                found[output.id] = output.error.code if output.error is not None else output.finish_reason.value
        core.check_integrity()
    return found


def test_both_cores_load_and_unload(core: Core, folder: Path) -> None:
    done, full = replies(core, LoadAdapter(1, "a:1", str(folder)), LoadAdapter(2, "b:1", str(folder)))
    assert done == CallReply(1)
    assert full.error is not None
    assert (full.call, full.error.code) == (2, "overloaded")
    found = replies(core, UnloadAdapter(3, "a:1"), UnloadAdapter(4, "a:1"), LoadAdapter(5, "b:2", str(folder)))
    assert found == [CallReply(3), CallReply(4), CallReply(5)]


def test_requests_pass_by_one_that_waits_for_its_adapter(core: Core, folder: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder)), ask((1,), "a:1"), ask((2,)), ask((3, 4), "a:1")])
    assert ends(core) == {2: "length"}
    assert core.stats().num_waiting == 3
    assert not core.has_work  # nothing is to be done until the descriptor says so
    assert not select.select(core.wakeups, [], [], 0)[0]
    gate.open()
    assert replies(core, count=1) == [CallReply(1)]
    assert ends(core) == dict.fromkeys((1, 3, 4), "length")


def test_who_waits_for_an_adapter_that_does_not_load_is_told(core: Core, tmp_path: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(tmp_path)), ask((1,), "a:1"), ask((2, 3), "a:1")])
    assert ends(core) == {}
    gate.open()
    found: list[RequestOutput] = []
    while not found:  # the bell rings just before there is something to fetch
        assert select.select(core.wakeups, [], [], 30)[0]
        found = core.step([]).outputs
    assert {output.id for output in found} == {1, 2, 3}
    for output in found:
        assert output.error is not None
        assert output.error.code == "invalid_request"
        assert output.error.message == (
            "The request's LoRA adapter could not be loaded: The folder holds no adapter_config.json."
        )
    core.check_integrity()
    assert core.stats().num_waiting == 0


def test_requests_that_wait_can_be_aborted(core: Core, folder: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder)), ask((1, 2), "a:1"), ask((3,), "a:1")])
    ended = core.step([AbortRequests([1, 3])]).outputs
    assert {output.id for output in ended} == {1, 3}
    assert ends(core) == {}
    core.check_integrity()
    gate.open()
    replies(core, count=1)
    assert ends(core) == {2: "length"}


def test_one_adapter_at_a_time_is_read(core: Core, folder: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder)), LoadAdapter(2, "b:1", str(folder))])
    [twice] = core.step([LoadAdapter(3, "b:1", str(folder))]).replies
    assert twice.error is not None
    assert (twice.call, twice.error.code) == (3, "already_exists")
    gate.open()
    assert replies(core, count=1) == [CallReply(1)]
    gate.open()
    [full] = replies(core, count=1)
    assert full.error is not None
    assert (full.call, full.error.code, gate.begun) == (2, "overloaded", ["a:1", "b:1"])


def test_an_adapter_is_unloaded_while_it_loads(core: Core, folder: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder)), LoadAdapter(2, "b:1", str(folder)), ask((1,), "a:1")])
    given_up, unloaded = core.step([UnloadAdapter(3, "a:1")]).replies
    assert given_up.error is not None
    assert (given_up.call, given_up.error.code, unloaded) == (1, "invalid_request", CallReply(3))
    gate.open()
    gate.open()
    assert replies(core, count=1) == [CallReply(2)]  # and the one slot is free for it


def test_an_adapter_is_unloaded_while_another_is_read(core: Core, folder: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder)), LoadAdapter(2, "b:1", str(folder))])
    given_up, unloaded = core.step([UnloadAdapter(3, "b:1")]).replies
    assert (given_up.call, unloaded) == (2, CallReply(3))
    gate.open()
    assert replies(core, count=1) == [CallReply(1)]
    assert gate.begun == ["a:1"], "what was being read is read on, and not from its start"


def test_an_adapter_whose_files_hang_is_unloaded(core: Core, folder: Path) -> None:
    gate = Gate(core, "hung:1")
    core.step([LoadAdapter(1, "hung:1", str(folder)), LoadAdapter(2, "b:1", str(folder)), ask((1,), "b:1")])
    assert replies(core, UnloadAdapter(3, "hung:1"), count=3)[1:] == [CallReply(3), CallReply(2)]
    assert ends(core) == {1: "length"}
    gate.open()
    join_threads()
    assert not select.select(core.wakeups, [], [], 0)[0], "nobody asks for it any more"
    assert core.step([]).replies == []


def test_an_adapter_whose_files_hang_is_given_up_in_the_end(core: Core, clock: Clock, folder: Path) -> None:
    gate = Gate(core, "hung:1")
    core.step([LoadAdapter(1, "hung:1", str(folder)), LoadAdapter(2, "b:1", str(folder)), ask((1,), "hung:1")])
    assert core.next_look == 600
    clock.now = 599
    assert core.step([]).replies == []
    clock.now = 600
    result = core.step([])
    [given_up], [output] = result.replies, result.outputs
    assert given_up.error is not None
    assert (given_up.call, given_up.error.message) == (1, "Its files were not read within 600 s.")
    assert output.error is not None
    assert (output.id, output.error.code) == (1, "engine_error")
    assert replies(core, count=1) == [CallReply(2)]
    assert core.next_look is None
    gate.open()
    join_threads()


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "adapter-loader":
            thread.join(30)
            assert not thread.is_alive()


def test_what_was_read_for_a_load_that_was_given_up_is_not_installed(core: Core, folder: Path) -> None:
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder))])
    core.step([UnloadAdapter(2, "a:1"), LoadAdapter(3, "a:1", str(folder / "nothing"))])
    gate.open()
    gate.open()
    [reply] = replies(core, count=1)
    assert reply.error is not None
    assert (reply.call, reply.error.code) == (3, "invalid_request")


def test_a_core_that_closes_gives_up_what_is_being_read(
    core: Core, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engines.adapter_loading._FAREWELL", 0.01)
    gate = Gate(core)
    core.step([LoadAdapter(1, "a:1", str(folder))])
    core.close()
    gate.open()
    join_threads()


class Clumsy:
    def __init__(self, error: Exception, install: Exception | None = None) -> None:
        self.error = error
        self.install = install

    def prepare_adapter(self, key: str, folder: Path) -> None:
        if self.install is None:
            raise self.error

    def install_adapter(self, key: str, prepared: object) -> None:
        raise self.error

    def unload_adapter(self, key: str) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("rank"), "invalid_request"),
        (OverloadedError("full"), "overloaded"),
        (ValueError("torn file"), "invalid_request"),
        (FileNotFoundError(2, "no file"), "invalid_request"),
        (KeyError("q_proj"), "engine_error"),
    ],
)
@pytest.mark.parametrize("where", ["prepare", "install", "unload"])
def test_whatever_goes_wrong_is_told(error: Exception, code: str, where: str) -> None:
    core = EngineCore(SimulatedRunner(SimulatedConfig()), SchedulerConfig(), lambda: 0.0)
    loader = AdapterLoader(Clumsy(error, error if where == "install" else None), core.scheduler.intake, Clock())
    found = loader.receive(UnloadAdapter(7, "a:1") if where == "unload" else LoadAdapter(7, "a:1", "/x"))
    while not found:
        assert select.select(loader.wakeups, [], [], 30)[0]
        found = loader.advance()
    [reply] = found
    assert reply.error is not None
    assert (reply.call, reply.error.code) == (7, code)
    assert str(error.args[-1]) in reply.error.message
    loader.close()


def test_an_engine_without_adapters_says_so() -> None:
    core = EngineCore(SimulatedRunner(SimulatedConfig()), SchedulerConfig(), lambda: 0.0)
    loader = adapter_loader(object(), core.scheduler.intake, Clock())
    assert isinstance(loader, NoAdapters)
    [reply] = loader.receive(LoadAdapter(1, "a:1", "/x"))
    assert reply.error is not None
    assert (reply.error.code, loader.wakeups) == ("unsupported_parameter", ())
    loader.close()


def test_the_simulated_engine_needs_room_and_an_adapters_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        load_adapter(SimulatedRunner(SimulatedConfig()), "a:1", folder)
    runner = SimulatedRunner(SimulatedConfig(max_loras=2, adapters={"a:1": str(folder)}))
    with pytest.raises(InvalidRequestError):
        load_adapter(runner, "b:1", tmp_path / "nowhere")
    load_adapter(runner, "b:1", folder)
    assert runner.adapters.held.keys() == {"a:1", "b:1"}
    with pytest.raises(InvalidRequestError):
        SimulatedRunner(SimulatedConfig(max_loras=2, adapters={"a:1": str(tmp_path / "nowhere")}))
