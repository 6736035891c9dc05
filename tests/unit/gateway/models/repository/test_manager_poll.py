"""Control mode poll: what is new, changed or gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.engines.errors import EngineError, ModelNotFoundError, NotReadyError
from support.repository import FakeLoader, FakeModel, FakeRepository, ask, serving, states, until


@pytest.fixture
def repository(tmp_path: Path) -> FakeRepository:
    repository = FakeRepository(tmp_path / "1")
    repository.put("a", "a1")
    return repository


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


async def test_added_changed_and_removed_models(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("b", "b1")
    async with serving(repository, loader=loader, control_mode="poll") as manager:
        assert states(manager) == ["a 1 READY", "b 1 READY"]
        repository.put("b", "b1 again")
        repository.put("c", "c1")
        repository.remove("a")
        await manager.poll()
        assert await ask(manager, "b") == "b1 again"
        assert await ask(manager, "c") == "c1"
        with pytest.raises(ModelNotFoundError, match="'a' has no available versions"):
            manager.model("a")
        assert manager.ready
        assert len(loader.models) == 4
        await manager.poll()
        assert len(loader.models) == 4, "nothing has changed"
        repository.put("a", "a2")
        await manager.poll()
        assert await ask(manager, "a") == "a2"
        with pytest.raises(NotReadyError, match="not allowed if polling is enabled"):
            await manager.load("a")


async def test_a_broken_change_is_tried_once(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, control_mode="poll") as manager:
        repository.put("a", "fail: half written")
        repository.put("b", "fail: half written")
        await manager.poll()
        assert await ask(manager, "a") == "a1"
        assert states(manager) == [
            "a 1 READY Invalid argument: half written",
            "b 1 UNAVAILABLE Invalid argument: half written",
        ]
        assert not manager.ready, "b should be loaded"
        (repository.folder / "b" / "1" / "model.txt").write_text("fine now, but the fingerprint is the old one")
        await manager.poll()
        assert manager.versions("b") == []
        repository.put("b", "whole")
        await manager.poll()
        assert await ask(manager, "b") == "whole"
        repository.put("c", config="no_such_field: 1")
        await manager.poll()
        assert [line.partition(":")[0] for line in states(manager)][2] == (
            "c UNAVAILABLE failed to read the model configuration c/config.pbtxt"
        )
        repository.remove("c")
        await manager.poll()
        assert [line.split()[0] for line in states(manager)] == ["a", "b"]
        assert manager.ready


async def test_a_removed_model_that_comes_back_unchanged(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, control_mode="poll") as manager:
        stamp = repository.stamps.pop("a")
        await manager.poll()
        assert manager.versions("a") == []
        repository.stamps["a"] = stamp
        await manager.poll()
        assert await ask(manager, "a") == "a1"


async def test_a_repository_that_cannot_be_read_changes_nothing(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, control_mode="poll") as manager:
        repository.fail = EngineError("the store is down")
        with pytest.raises(EngineError, match="the store is down"):
            await manager.poll()
        assert states(manager) == ["a 1 READY"]
        assert await ask(manager, "a") == "a1"
        assert manager.ready


async def test_a_model_that_cannot_be_looked_at_has_the_reason_in_the_index(
    repository: FakeRepository, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.put("c", "fail: broken")
    async with serving(repository, loader=loader, control_mode="poll", exit_on_error=False) as manager:
        repository.put("b", "b1")

        def unreadable(name: str) -> str:
            raise EngineError(f"the folder of model '{name}' cannot be read: Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(repository, "fingerprint", unreadable)
            await manager.poll()
            assert states(manager) == [
                "a 1 READY the folder of model 'a' cannot be read: Permission denied",
                "b UNAVAILABLE the folder of model 'b' cannot be read: Permission denied",
                "c 1 UNAVAILABLE the folder of model 'c' cannot be read: Permission denied",
            ]
            assert await ask(manager, "a") == "a1"
        await manager.poll()
        assert states(manager) == ["a 1 READY", "b 1 READY", "c 1 UNAVAILABLE Invalid argument: broken"]
        assert await ask(manager, "b") == "b1"


async def test_what_is_as_it_was_has_no_reason_beside_it(repository: FakeRepository, loader: FakeLoader) -> None:
    before = repository.stamps["a"]
    async with serving(repository, loader=loader, control_mode="poll") as manager:
        repository.put("a", "fail: broken")
        await manager.poll()
        assert states(manager) == ["a 1 READY Invalid argument: broken"]
        repository.stamps["a"] = before
        await manager.poll()
        assert states(manager) == ["a 1 READY"]


async def test_a_second_model_of_the_name_makes_it_unavailable(
    repository: FakeRepository, loader: FakeLoader, tmp_path: Path
) -> None:
    other = FakeRepository(tmp_path / "2")
    async with serving(repository, other, loader=loader, control_mode="poll") as manager:
        other.put("a", "other")
        await manager.poll()
        await until(lambda: states(manager) == ["a 1 UNAVAILABLE model appears in two or more repositories"])
        assert not manager.ready
        repository.remove("a")
        await manager.poll()
        assert await ask(manager, "a") == "other"


async def test_added_models_are_left_alone(
    repository: FakeRepository, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(repository, loader=loader, control_mode="poll") as manager:
        manager.add(FakeModel("llm", 1, "llm"))
        repository.put("llm", "an impostor")
        await manager.poll()
        assert await ask(manager, "llm") == "llm"
        assert "'llm' is in a model repository, too" in caplog.text
        assert manager.ready


async def test_polls_go_on_by_themselves(
    repository: FakeRepository, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(repository, loader=loader, control_mode="poll", poll_seconds=0.001) as manager:
        repository.fail = EngineError("the store is down")
        await until(lambda: "could not be polled: the store is down" in caplog.text)
        repository.put("b", "b1")
        repository.fail = None
        await until(lambda: manager.versions("b") == [1])
        loader.gate = asyncio.Event()
        repository.put("c", "c1")
        await until(lambda: loader.waiting == 1)
        repository.remove("c")
