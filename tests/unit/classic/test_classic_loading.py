"""Backends by name, instance groups, and loads that fail halfway."""

from __future__ import annotations

import asyncio
import threading
from importlib.metadata import EntryPoint

import pytest

from penstock.classic import instances as groups
from penstock.classic import loading as registry
from penstock.classic.base import Batch, InstanceContext, ModelContext
from penstock.classic.identity import IdentityBackend
from penstock.classic.instances import instance_contexts
from penstock.engines.errors import EngineError
from support.classic import ECHO, FakeAsyncInstance, FunctionBackend, echo, load, model_config, until


def instances(text: str, *, gpus: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    monkeypatch.setattr(groups, "visible_gpus", lambda: gpus)
    return [(one.name, one.kind, one.device_id) for one in instance_contexts(model_config(ECHO, text))]


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("", 1, [("echo_0_0", "CPU", 0)]),
        ("instance_group { count: 2 kind: KIND_CPU }", 1, [("echo_0_0", "CPU", 0), ("echo_0_1", "CPU", 0)]),
        ("instance_group { count: 2 kind: KIND_MODEL }", 2, [("echo_0_0", "MODEL", 0), ("echo_0_1", "MODEL", 0)]),
        ("instance_group { kind: KIND_AUTO }", 0, [("echo_0_0", "CPU", 0)]),
        ("instance_group { kind: KIND_AUTO }", 2, [("echo_0_0", "GPU", 0), ("echo_0_1", "GPU", 1)]),
        ("instance_group { kind: KIND_GPU count: 2 gpus: [ 1 ] }", 2, [("echo_0_0", "GPU", 1), ("echo_0_1", "GPU", 1)]),
        (
            'instance_group { name: "own" kind: KIND_CPU } instance_group { kind: KIND_GPU }',
            1,
            [("own_0", "CPU", 0), ("echo_1_0", "GPU", 0)],
        ),
    ],
)
def test_instances_of_groups(
    text: str, gpus: int, expected: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert instances(text, gpus=gpus, monkeypatch=monkeypatch) == expected


@pytest.mark.parametrize(
    ("text", "gpus", "error"),
    [
        ("instance_group { kind: KIND_GPU }", 0, "echo_0 has kind KIND_GPU but no GPUs are available"),
        ("instance_group { kind: KIND_GPU gpus: [ 0, 3 ] }", 2, "asks for GPU 3, this machine has 2"),
        ("instance_group { kind: KIND_CPU gpus: [ 0 ] }", 1, "has kind KIND_CPU but specifies one or more GPUs"),
        ("instance_group { kind: KIND_MODEL gpus: [ 0 ] }", 1, "has kind KIND_MODEL but specifies one or more GPUs"),
    ],
)
def test_groups_that_cannot_be_had(text: str, gpus: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=error):
        instances(text, gpus=gpus, monkeypatch=monkeypatch)


def test_backends_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        name: EntryPoint(name, value, registry.GROUP)
        for name, value in {
            "identity": "penstock.classic.identity:IdentityBackend",
            "lost": "penstock.no_such_module:Backend",
            "nothing": "penstock.classic.identity:NoSuchClass",
            "other": "pathlib:Path",
        }.items()
    }
    monkeypatch.setattr(registry, "_entries", lambda: entries)
    assert registry.find_backend("identity") is IdentityBackend
    with pytest.raises(ValueError, match="no backend is called 'zzz'; there are identity, lost, nothing, other"):
        registry.find_backend("zzz")
    for name in ("lost", "nothing"):
        with pytest.raises(ValueError, match=f"the backend '{name}' cannot be imported"):
            registry.find_backend(name)
    with pytest.raises(ValueError, match=r"'other' of penstock\.backends is not a Backend"):
        registry.find_backend("other")


def test_the_distribution_names_its_backends() -> None:
    assert {"identity", "onnxruntime", "python", "tensorrt"} <= set(registry.backend_names())


async def test_instances_load_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=30)

    def make(context: InstanceContext):  # type: ignore[no-untyped-def]
        together.wait()
        return echo

    backend = FunctionBackend(make)
    model = await load(model_config(ECHO, "instance_group { count: 3 kind: KIND_CPU }"), backend)
    assert model.ready
    assert (model.name, model.version, model.config.name) == ("echo", 1, "echo")
    await model.stop()
    assert sorted(backend.unloaded[:-1]) == ["echo_0_0", "echo_0_1", "echo_0_2"]
    assert backend.unloaded[-1] == "model"


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (ValueError("bad file"), ValueError, "^bad file$"),
        (EngineError("no memory"), EngineError, "^no memory$"),
        (KeyError("x"), EngineError, "KeyError: 'x'"),
    ],
)
async def test_a_load_that_fails_halfway_is_undone(raised: Exception, error: type[Exception], text: str) -> None:
    async def execute(batch: Batch) -> None:
        echo(batch)

    running = FakeAsyncInstance(execute)

    def make(context: InstanceContext):  # type: ignore[no-untyped-def]
        if context.name == "echo_0_1":
            raise raised
        return running if context.name == "echo_0_2" else echo

    backend = FunctionBackend(make)
    with pytest.raises(error, match=text):
        await load(model_config(ECHO, "instance_group { count: 3 kind: KIND_CPU }"), backend)
    assert backend.unloaded == ["echo_0_0", "model"]
    assert running.unloaded


async def test_a_load_that_is_given_up_leaves_nothing() -> None:
    started, release = threading.Event(), threading.Event()

    def make(context: InstanceContext):  # type: ignore[no-untyped-def]
        started.set()
        release.wait(30)
        return echo

    backend = FunctionBackend(make)
    loading = asyncio.ensure_future(load(model_config(ECHO), backend))
    await asyncio.to_thread(started.wait, 30)
    loading.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert backend.unloaded == ["echo_0_0", "model"]


async def test_a_process_that_hangs_while_it_loads_is_given_up_at_once() -> None:
    async def execute(batch: Batch) -> None:
        echo(batch)

    class Hangs(FakeAsyncInstance):
        async def start(self) -> None:
            waiting.set()
            await asyncio.Event().wait()

    waiting = asyncio.Event()
    running = FakeAsyncInstance(execute)
    backend = FunctionBackend(lambda context: Hangs(execute) if context.name == "echo_0_0" else running)
    config = model_config(ECHO, "instance_group { count: 2 kind: KIND_CPU }")
    loading = asyncio.ensure_future(load(config, backend))
    await waiting.wait()
    await until(lambda: running.up)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(loading, 30)
    assert running.unloaded
    assert backend.unloaded == ["model"]


async def test_an_error_in_load_model_is_an_error_of_the_load() -> None:
    class Broken(FunctionBackend):
        def load_model(self, context: ModelContext):  # type: ignore[no-untyped-def]
            raise MemoryError("too large")

    with pytest.raises(EngineError, match="MemoryError: too large"):
        await load(model_config(ECHO), Broken(lambda context: echo))
