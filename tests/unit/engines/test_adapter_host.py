"""LoRA adapters that come and go while an engine runs: what both cores answer, and what the simulated engine keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.adapter_messages import carry_out
from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.messages import AdapterReply, LoadAdapter, UnloadAdapter
from penstock.engines.core import Core, EngineCore
from penstock.engines.errors import InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedBatcher, SimulatedBatcherConfig, SimulatedConfig, SimulatedRunner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("kind", [EngineCore, AutonomousCore])
def test_both_cores_load_and_unload(kind: type, folder: Path) -> None:
    if kind is EngineCore:
        core: Core = EngineCore(SimulatedRunner(SimulatedConfig(max_loras=1)), SchedulerConfig(), lambda: 0.0)
    else:
        core = AutonomousCore(SimulatedBatcher(SimulatedBatcherConfig(max_loras=1)), SchedulerConfig(), lambda: 0.0)
    replies = core.step([LoadAdapter(1, "a:1", str(folder)), LoadAdapter(2, "b:1", str(folder))]).replies
    assert replies[0] == AdapterReply(1)
    assert (replies[1].call, replies[1].error.code) == (2, "overloaded")
    replies = core.step([UnloadAdapter(3, "a:1"), UnloadAdapter(4, "a:1"), LoadAdapter(5, "b:2", str(folder))]).replies
    assert replies == [AdapterReply(3), AdapterReply(4), AdapterReply(5)]


class Clumsy:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def load_adapter(self, key: str, folder: Path) -> None:
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
@pytest.mark.parametrize("message", [LoadAdapter(7, "a:1", "/x"), UnloadAdapter(7, "a:1")])
def test_whatever_goes_wrong_is_told(error: Exception, code: str, message: LoadAdapter | UnloadAdapter) -> None:
    reply = carry_out(message, Clumsy(error))
    assert (reply.call, reply.error.code) == (7, code)
    assert str(error.args[-1]) in reply.error.message


def test_an_engine_without_adapters_says_so() -> None:
    reply = carry_out(LoadAdapter(1, "a:1", "/x"), object())
    assert reply.error.code == "unsupported_parameter"


def test_the_simulated_engine_needs_room_and_an_adapters_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        SimulatedRunner(SimulatedConfig()).load_adapter("a:1", folder)
    runner = SimulatedRunner(SimulatedConfig(max_loras=2, adapters={"a:1": str(folder)}))
    with pytest.raises(InvalidRequestError):
        runner.load_adapter("b:1", tmp_path / "nowhere")
    runner.load_adapter("b:1", folder)
    assert runner.adapters == {"a:1", "b:1"}
    with pytest.raises(InvalidRequestError):
        SimulatedRunner(SimulatedConfig(max_loras=2, adapters={"a:1": str(tmp_path / "nowhere")}))
