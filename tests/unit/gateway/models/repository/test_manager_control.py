"""Control modes, the index, versions, look-ups, added models, readiness."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from penstock.classic.base import abandoned
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import (
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    UnsupportedError,
)
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.requests.context import ALL_ROLES, USER_ROLES, Principal, Role
from support.repository import FakeLoader, FakeModel, FakeRepository, ask, loaders_of, serving, states, until


@pytest.fixture
def repository(tmp_path: Path) -> FakeRepository:
    return FakeRepository(tmp_path)


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


async def test_mode_none_loads_everything(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    repository.put("b", "b1", "b2", config="version_policy { all {} }")
    async with serving(repository, loader=loader, control_mode="none") as manager:
        assert states(manager) == ["a 1 READY", "b 1 READY", "b 2 READY"]
        assert manager.ready
        assert [(model.name, model.version) for model in manager.models()] == [("a", 1), ("b", 1), ("b", 2)]
        assert manager.versions("b") == [1, 2]
        assert manager.versions("c") == []
        assert await ask(manager, "b") == "b2"
        assert await ask(manager, "b", "1") == "b1"
        assert set(manager.load_seconds()) == {("a", 1), ("b", 1), ("b", 2)}
        with pytest.raises(NotReadyError, match=r"^explicit model load / unload is not allowed if polling is enabled$"):
            await manager.load("a")
        with pytest.raises(NotReadyError, match=r"^explicit model load / unload is not allowed if polling is enabled$"):
            await manager.unload("a")


async def test_explicit_mode_loads_what_it_is_told(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    repository.put("b", "b1")
    async with serving(repository, loader=loader, load_models=("b",)) as manager:
        assert states(manager) == ["a", "b 1 READY"]
        assert states(manager, ready=True) == ["b 1 READY"]
        await manager.load("a")
        await manager.unload("b")
        assert manager.model("a").ready
        with pytest.raises(ModelNotFoundError, match=r"^Request for unknown model: 'b' has no available versions$"):
            manager.model("b")
        assert manager.ready, "what was unloaded on purpose is not missed"
        repository.put("c", "c1")
        assert states(manager)[0] == "a 1 READY"
        assert states(manager)[2] == "c", "the index looks at the repository again"


async def test_explicit_mode_loads_all_for_a_star(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    repository.put("b", "b1")
    async with serving(repository, loader=loader, load_models=("*",)) as manager:
        assert states(manager) == ["a 1 READY", "b 1 READY"]


async def test_the_index_shows_every_state(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    repository.put("bad", "fail: the file is broken")
    async with serving(repository, loader=loader) as manager:
        loader.gate = asyncio.Event()
        loading = asyncio.create_task(manager.load("a"))
        await until(lambda: loader.waiting == 1)
        assert states(manager) == ["a 1 LOADING", "bad"]
        loader.gate.set()
        await loading
        assert states(manager) == ["a 1 READY", "bad"]
        model = loader.models[0]
        model.hold = asyncio.Event()
        request = asyncio.create_task(ask(manager, "a"))
        await until(lambda: len(model.requests) == 1)
        await manager.unload("a")
        assert states(manager) == ["a 1 UNLOADING", "bad"]
        with pytest.raises(NotReadyError, match=r"^Request for unknown model: 'a' version 1 is not at ready state$"):
            manager.model("a", "1")
        model.hold.set()
        assert await request == "a1"
        with pytest.raises(
            InvalidRequestError, match="version 1 is at UNAVAILABLE state: Invalid argument: the file is broken;"
        ):
            await manager.load("bad")
        await until(lambda: "a 1 UNAVAILABLE unloaded" in states(manager))
        assert states(manager) == ["a 1 UNAVAILABLE unloaded", "bad 1 UNAVAILABLE Invalid argument: the file is broken"]


async def test_unknown_models_and_versions(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        with pytest.raises(ModelNotFoundError, match=r"^Request for unknown model: 'x' is not found$"):
            manager.model("x")
        with pytest.raises(ModelNotFoundError, match=r"^Request for unknown model: 'a' version 9 is not found$"):
            manager.model("a", "9")
        for version in ("x", "-1", "0", "1.0", " 1", "٣", "9" * 5000):
            with pytest.raises(InvalidRequestError, match="version should be an integral value > 0"):
                manager.model("a", version)
        with pytest.raises(ModelNotFoundError, match=r"^failed to load 'zzz', failed to poll from model repository$"):
            await manager.load("zzz")
        await manager.unload("zzz")
        assert states(manager) == ["a 1 READY"], "asking for unknown models leaves nothing behind"


@pytest.mark.parametrize("path", ["/models/a", "models/a/"])
async def test_load_model_with_a_path(repository: FakeRepository, loader: FakeLoader, path: str) -> None:
    """Report server#4697: `--load-model=/models/a`."""
    repository.put("a", "a1")
    async with serving(repository, loader=loader, load_models=(path,), start=False) as manager:
        with pytest.raises(EngineError, match=f"{path}: .*: a model is loaded by its name, not by a path: 'a'"):
            await manager.start()


@pytest.mark.parametrize(
    "name", ["", " ", "\t", "..", ".", "../a", "a/b", "/etc/passwd", "a\\b", "a\0", "%2e%2e", "．．"]
)
async def test_names_that_no_model_can_have(repository: FakeRepository, loader: FakeLoader, name: str) -> None:
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(InvalidRequestError, match=r"[Mm]odel name"):
            await manager.load(name)


@pytest.mark.parametrize("name", ["...", "..my_model", "model..1", ".hidden"])
async def test_strange_names_are_merely_unknown(repository: FakeRepository, loader: FakeLoader, name: str) -> None:
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(ModelNotFoundError):
            await manager.load(name)


async def test_a_failure_at_the_start_stops_the_server(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    repository.put("bad", "fail: broken")
    repository.put("worse", "w1", config="no_such_field: 1")
    async with serving(repository, loader=loader, control_mode="none", start=False) as manager:
        with pytest.raises(EngineError, match=r"(?s)serves the others:\n  bad: .*broken.*\n  worse: .*no_such_field"):
            await manager.start()
        assert not manager.ready


async def test_without_exit_on_error_the_others_serve(
    repository: FakeRepository, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    repository.put("a", "a1")
    repository.put("bad", "fail: broken")
    repository.put("odd", "o1", config='name: "other"')
    async with serving(repository, loader=loader, control_mode="none", exit_on_error=False) as manager:
        assert await ask(manager, "a") == "a1"
        assert not manager.ready
        assert states(manager)[:2] == ["a 1 READY", "bad 1 UNAVAILABLE Invalid argument: broken"]
        assert states(manager)[2].startswith("odd UNAVAILABLE unexpected directory name 'odd' for model 'other'")
        assert "model 'bad': load failed for model 'bad': version 1" in caplog.text
        assert "model 'odd': failed to load 'odd', failed to poll from model repository: unexp" in caplog.text
    async with serving(
        repository, loader=loader, control_mode="none", exit_on_error=False, strict_readiness=False
    ) as manager:
        assert manager.ready


async def test_contents_of_files_are_for_those_who_may_administer(
    repository: FakeRepository, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """A configuration may be a link to any file that the server can read."""
    repository.put("a", "a1")
    repository.put("named", "n1", config='name: "sEcReT"')
    repository.put("read", "r1", config="sEcReT: 1")
    ensemble = """platform: "ensemble" input { name: "I" data_type: TYPE_FP32 dims: 1 }
        output { name: "O" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling { step { model_name: "read"
        model_version: -1 input_map { key: "I" value: "I" } output_map { key: "O" value: "O" } } }"""
    repository.put("whole", "w1")
    (repository.folder / "whole" / "config.pbtxt").write_text(ensemble)

    def reasons(manager: ModelRepository, roles: frozenset[Role]) -> dict[str, str]:
        return {line.name: line.reason_for(Principal(roles=roles)) for line in manager.index(ready=False)}

    async with serving(repository, loader=loader, control_mode="poll", exit_on_error=False) as manager:
        told = reasons(manager, USER_ROLES)
        assert told["named"] == "unexpected directory name 'named', directory name must equal model name"
        assert told["read"] == "failed to read the model configuration read/config.pbtxt:2:1"
        assert told["whole"].endswith(f"Model 'read' loading failed with error: {told['read']}")
        full = reasons(manager, ALL_ROLES)
        assert full["named"] == "unexpected directory name 'named' for model 'sEcReT'" + told["named"][33:]
        assert full["read"] == f'{told["read"]}: Message type "inference.ModelConfig" has no field named "sEcReT".'
        repository.put("a", "a2", config="sEcReT: 1")
        await manager.poll()
        assert states(manager)[0].startswith("a 1 READY failed to read the model configuration a/config.pbtxt:2:1: Me")
        assert reasons(manager, USER_ROLES)["a"] == "failed to read the model configuration a/config.pbtxt:2:1"
        repository.put("a", v3="fail: broken")
        await manager.poll()
        assert "sEcReT" not in str(
            [line.reason_for(Principal(roles=USER_ROLES)) for line in manager.index(ready=False)]
        )
        assert 'no field named "sEcReT"' in caplog.text


async def test_unknown_names_to_load_at_the_start(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("zzz",), exit_on_error=False) as manager:
        assert not manager.ready
        await manager.unload("zzz")
        assert manager.ready


async def test_readiness_follows_the_models(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    async with serving(repository, loader=loader, control_mode="none", start=False) as manager:
        assert not manager.ready
        await manager.start()
        assert manager.ready
        loader.models[0].ready = False
        assert not manager.ready
        assert not manager.host.model_ready("a")
        with pytest.raises(NotReadyError):
            manager.host.model("a")
        loader.models[0].ready = True
    assert not manager.ready


async def test_a_model_that_says_that_it_is_not_ready_is_still_served(
    repository: FakeRepository, loader: FakeLoader
) -> None:
    repository.put("a", "a1")
    async with serving(repository, loader=loader, control_mode="none") as manager:
        loader.models[0].says_ready = False
        assert not manager.ready
        assert not manager.host.model_ready("a")
        assert manager.host.model("a") is loader.models[0]
        assert states(manager, ready=True) == ["a 1 READY"]


async def test_a_failed_first_load_on_request_is_the_callers_business(
    repository: FakeRepository, loader: FakeLoader
) -> None:
    repository.put("bad", "fail: broken")
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(InvalidRequestError):
            await manager.load("bad")
        assert manager.ready


async def test_two_models_of_a_name(tmp_path: Path, loader: FakeLoader) -> None:
    first, second = FakeRepository(tmp_path / "1"), FakeRepository(tmp_path / "2")
    first.put("a", "a1")
    first.put("b", "b1")
    second.put("a", "other")
    duplicate = "a UNAVAILABLE model appears in two or more repositories"
    async with serving(first, second, loader=loader, control_mode="none", exit_on_error=False) as manager:
        assert states(manager) == [duplicate, "b 1 READY"]
        assert not manager.ready
    async with serving(first, second, loader=loader) as manager:
        assert states(manager) == [duplicate, "b"]
        with pytest.raises(InvalidRequestError, match="two or more repositories"):
            await manager.load("a")
        second.remove("a")
        await manager.load("a")
        second.put("a", "other")
        with pytest.raises(InvalidRequestError, match="two or more repositories"):
            await manager.load("a")
        assert await ask(manager, "a") == "a1", "a refused load leaves what serves alone"


async def test_added_models(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    llm = FakeModel("llm", 1, "llm")
    async with serving(repository, loader=loader, start=False) as manager:
        manager.add(llm)
        with pytest.raises(AlreadyExistsError):
            manager.add(FakeModel("llm", 1, "again"))
        await manager.start()
        with pytest.raises(AlreadyExistsError):
            manager.add(FakeModel("a", 1, "a"))
        assert states(manager) == ["a", "llm 1 READY"]
        assert await ask(manager, "llm") == "llm"
        for change in (manager.load("llm"), manager.unload("llm"), manager.load("llm", config="{}")):
            with pytest.raises(InvalidRequestError, match="does not come from a model repository"):
                await change
        llm.ready = False
        assert not manager.ready
        assert states(manager) == ["a", "llm 1 LOADING"]
    assert not llm.unloaded, "its owner stops it"


async def test_an_added_model_with_the_name_of_a_stored_one(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    async with serving(repository, loader=loader, start=False, exit_on_error=False) as manager:
        manager.add(FakeModel("a", 1, "added"))
        with pytest.raises(AlreadyExistsError, match="'a' is in a model repository, too"):
            await manager.start()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [30]),
        ("version_policy { latest { num_versions: 2 } }", [2, 30]),
        ("version_policy { all {} }", [1, 2, 30]),
        ("version_policy { specific { versions: [1, 2] } }", [1, 2]),
    ],
)
async def test_version_policies(
    repository: FakeRepository, loader: FakeLoader, policy: str, expected: list[int]
) -> None:
    repository.put("a", config=policy, v1="one", v2="two", v30="thirty")
    async with serving(repository, loader=loader, load_models=("*",)) as manager:
        assert manager.versions("a") == expected
        assert manager.model("a").version == expected[-1]


async def test_all_versions_or_none(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1", "fail: broken", "a3", config="version_policy { all {} }")
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(InvalidRequestError, match="load failed for model 'a': version 2 is at UNAVAILABLE state"):
            await manager.load("a")
        assert states(manager) == [
            "a 1 UNAVAILABLE unloaded",
            "a 2 UNAVAILABLE Invalid argument: broken",
            "a 3 UNAVAILABLE unloaded",
        ]
        assert len(loader.models) == 2
        assert loader.live == []


async def test_what_a_configuration_may_be_refused_for(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1", config="model_operations { op_library_filename: 'x' }")
    repository.put("b", config="")
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(UnsupportedError, match="model_operations"):
            await manager.load("a")
        with pytest.raises(
            InvalidRequestError, match=r"load failed for model 'b': at least one version must .* of model 'b'"
        ):
            await manager.load("b")
        with pytest.raises(InvalidRequestError, match="no backend is called 'nope'"):
            await manager.load("b", config='{"backend": "nope"}', files={"1/x": b""})


async def test_each_version_has_a_configuration_of_its_own(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1", "a2", config="version_policy { all {} }")
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        completed = [model.config.parameters["completed"].string_value for model in manager.models()]
        assert completed == ["1", "2"]
        assert manager.model("a").config.instance_group[0].count == 1
    async with serving(repository, loader=loader, load_models=("a",), auto_complete=False) as manager:
        assert "completed" not in manager.model("a").config.parameters


async def test_loads_are_bounded_and_parallel(repository: FakeRepository, loader: FakeLoader) -> None:
    for number in range(6):
        repository.put(f"m{number}", "x")
    async with serving(repository, loader=loader, control_mode="none", load_threads=3, start=False) as manager:
        loader.gate = asyncio.Event()
        starting = asyncio.create_task(manager.start())
        await until(lambda: loader.waiting == 3)
        loader.gate.set()
        await starting
        assert loader.most_waiting == 3


async def test_load_retries(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    async with serving(repository, loader=loader, load_retries=2) as manager:
        loader.broken["a", 1] = [EngineError("1"), ValueError("2")]
        await manager.load("a")
        await manager.unload("a")
        loader.broken["a", 1] = [EngineError("1"), ValueError("2"), RuntimeError("first\nlast")]
        with pytest.raises(
            InvalidRequestError,
            match=r"Internal: RuntimeError: first; last \(backend fake\); --log-level debug shows the trace",
        ):
            await manager.load("a")


async def test_stopping_ends_what_is_being_loaded(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1", "a2", config="version_policy { all {} }")
    repository.put("b", "b1")
    manager = ModelRepository(RepositorySettings(control_mode="none", load_threads=2), loaders_of(loader), [repository])  # type: ignore[list-item]
    loader.gate = asyncio.Event()
    starting = asyncio.create_task(manager.start())
    await until(lambda: loader.waiting == 2)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await manager.stop()
    assert loader.waiting == 0
    assert repository.open_copies == 0
    with pytest.raises(NotReadyError):
        await manager.load("a")


async def test_stopping_ends_what_completes_a_configuration(
    repository: FakeRepository, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would keep the server."""
    completing: list[Future[None]] = []

    def complete(config: ModelConfig, version_folder: Path) -> None:
        completing.append(abandoned.get())
        completing[0].result(timeout=60)

    monkeypatch.setattr(loader, "auto_complete", complete)
    repository.put("a", "a1")
    async with serving(repository, loader=loader, control_mode="none", start=False) as manager:
        starting = asyncio.create_task(manager.start())
        await until(lambda: bool(completing))
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    assert completing[0].done()


async def test_load_requests_that_the_end_of_the_server_meets(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "a1")
    async with serving(repository, loader=loader) as manager:
        loader.gate = asyncio.Event()
        loads = [asyncio.create_task(manager.load("a")) for _ in range(2)]
        await until(lambda: loader.waiting == 1)
        await manager.stop()
        for load in loads:
            with pytest.raises(NotReadyError, match="the server is shutting down"):
                await load
        with pytest.raises(NotReadyError, match="the server is shutting down"):
            await manager.load("a")


async def test_a_stop_that_is_cancelled_waits_for_nobody_and_leaves_no_files(
    repository: FakeRepository, loader: FakeLoader
) -> None:
    repository.put("a", "a1")
    manager = ModelRepository(RepositorySettings(), loaders_of(loader), [repository])  # type: ignore[list-item]
    await manager.start()
    model = loader.models[0]
    model.hold = asyncio.Event()
    request = asyncio.create_task(ask(manager, "a"))
    await until(lambda: len(model.requests) == 1)
    stopping = asyncio.create_task(manager.stop())
    await until(lambda: not model.ready)
    assert not stopping.done()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert repository.open_copies == 0
    model.hold.set()
    assert await request == "a1"
