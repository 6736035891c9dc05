"""Whose scheduler drives an engine: ours wherever it can, the engine's own where it must or is told to."""

from __future__ import annotations

import msgspec
import pytest

from penstock.engines import registry
from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.core import EngineCore
from penstock.engines.errors import UnsupportedError
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import OwnThread, SimulatedBatcher, SimulatedConfig, SimulatedRunner


def load(runner: str, scheduling: str, **options: object):
    return load_core(EngineSpec(runner=runner, scheduling=scheduling, options=options), lambda: 0.0)


@pytest.mark.parametrize("scheduling", ["auto", "penstock"])
def test_ours_where_it_can(scheduling):
    core = load("simulated", scheduling)
    assert isinstance(core, EngineCore)
    assert isinstance(core.runner, SimulatedRunner)


def test_the_engines_own_when_told_to():
    core = load("simulated", "engine", num_blocks=77)
    assert isinstance(core, AutonomousCore)
    assert isinstance(core.batcher, SimulatedBatcher)
    assert (core.info.num_blocks, core.batcher.wakeup) == (77, None)


def test_the_engines_own_in_a_thread():
    core = load("simulated", "engine", own_thread=True)
    assert isinstance(core.batcher, OwnThread)
    assert core.batcher.wakeup in core.wakeups
    core.close()


def test_guesses_are_verified_by_our_scheduler_alone(monkeypatch):
    guessing = EngineSpec(runner="simulated", scheduler=SchedulerConfig(speculative="ngram"))
    assert isinstance(load_core(guessing, lambda: 0.0), EngineCore)
    with pytest.raises(UnsupportedError, match="needs Penstock's scheduler; for this engine use engine_args"):
        load_core(msgspec.structs.replace(guessing, scheduling="engine"), lambda: 0.0)
    monkeypatch.setitem(registry.RUNNERS, "simulated", refuse)
    with pytest.raises(UnsupportedError, match="--speculative needs Penstock's scheduler: a model with several kinds"):
        load_core(guessing, lambda: 0.0)


def test_an_engine_that_cannot_verify_guesses_says_so(monkeypatch):
    runner = SimulatedRunner(SimulatedConfig())
    runner.info = msgspec.structs.replace(runner.info, supports_drafts=False)
    monkeypatch.setitem(registry.RUNNERS, "torch", lambda options, report: runner)
    with pytest.raises(UnsupportedError, match=r"--speculative: this engine cannot verify guesses \(simulated\)"):
        load_core(EngineSpec(runner="torch", scheduler=SchedulerConfig(speculative="ngram")), lambda: 0.0)


def refuse(options, report):
    raise UnsupportedError("a model with several kinds of layers", param="scheduler")


def test_the_engines_own_where_ours_cannot(monkeypatch, caplog):
    monkeypatch.setitem(registry.RUNNERS, "simulated", refuse)
    assert isinstance(load("simulated", "auto"), AutonomousCore)
    assert "several kinds of layers" in caplog.text
    assert "--scheduler engine" not in caplog.text, "it does so already"
    with pytest.raises(UnsupportedError, match=r"several kinds of layers\. Its own scheduler can: --scheduler engine"):
        load("simulated", "penstock")


@pytest.mark.parametrize("scheduling", ["auto", "penstock"])
def test_no_way_out_for_what_no_scheduler_can_run(monkeypatch, scheduling):
    def refuse_for_good(options, report):
        raise UnsupportedError("a model with two prompts")

    monkeypatch.setitem(registry.RUNNERS, "simulated", refuse_for_good)
    with pytest.raises(UnsupportedError, match=r"a model with two prompts$"):
        load("simulated", scheduling)


def test_settings_that_the_engines_own_does_not_heed_are_named(monkeypatch, caplog):
    monkeypatch.setitem(registry.RUNNERS, "simulated", refuse)
    config = SchedulerConfig(itl_target_ms=50, steps_in_flight=1, max_queued_requests=7)
    load_core(EngineSpec(runner="simulated", scheduler=config), lambda: 0.0)
    assert "not used by simulated's own scheduler: --itl-target-ms, --steps-in-flight" in caplog.messages
    caplog.clear()
    load("simulated", "auto")
    assert "not used" not in caplog.text


def test_no_way_out_without_an_own_scheduler(monkeypatch):
    monkeypatch.setitem(registry.RUNNERS, "torch", refuse)
    with pytest.raises(UnsupportedError):
        load("torch", "auto")


@pytest.mark.parametrize(
    ("runner", "scheduling", "words"),
    [
        ("torch", "engine", "no scheduler of its own"),
        ("tensorrt_llm", "penstock", "only a scheduler of its own"),
        ("steam", "auto", "no engine is called 'steam'"),
    ],
)
def test_what_cannot_be_is_said(monkeypatch, runner, scheduling, words):
    monkeypatch.setitem(registry.BATCHERS, "tensorrt_llm", refuse)
    with pytest.raises(ValueError, match=words):
        load(runner, scheduling)
