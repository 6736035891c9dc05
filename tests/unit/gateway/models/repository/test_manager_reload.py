"""Replacing models that serve: nobody notices, whatever goes wrong."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.models.repository.manager import ModelRepository
from support.repository import CONFIG, FILES, FakeLoader, FakeRepository, ask, serving, states, until


@pytest.fixture
def repository(tmp_path: Path) -> FakeRepository:
    repository = FakeRepository(tmp_path)
    repository.put("a", "first")
    return repository


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


async def test_the_old_version_serves_until_the_new_one_is_ready(
    repository: FakeRepository, loader: FakeLoader
) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        old = loader.models[0]
        old.hold = asyncio.Event()
        request = asyncio.create_task(ask(manager, "a"))
        await until(lambda: len(old.requests) == 1)
        loader.gate = asyncio.Event()
        repository.put("a", "second")
        reload = asyncio.create_task(manager.load("a"))
        await until(lambda: loader.waiting == 1)
        assert manager.model("a") is old
        assert states(manager) == ["a 1 READY"]
        assert manager.ready
        loader.gate.set()
        await reload
        assert await ask(manager, "a") == "second"
        assert not old.unloaded, "it still has a request to answer"
        old.hold.set()
        assert await request == "first"
        await until(lambda: old.unloaded)
        assert states(manager) == ["a 1 READY"]


async def test_a_failed_reload_keeps_the_old_one(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        repository.put("a", "fail: broken")
        for _ in range(2):
            with pytest.raises(
                InvalidRequestError, match="version 1 is at UNAVAILABLE state: Invalid argument: broken;"
            ):
                await manager.load("a")
            assert await ask(manager, "a") == "first"
            assert states(manager) == ["a 1 READY Invalid argument: broken"]
        assert manager.ready
        repository.put("a", "x", config="max_batch_size: -1 no_such_field: 2")
        with pytest.raises(InvalidRequestError, match="failed to load 'a', failed to poll from model repository: "):
            await manager.load("a")
        assert states(manager)[0].startswith("a 1 READY failed to read the model configuration")
        repository.remove("a")
        with pytest.raises(ModelNotFoundError):
            await manager.load("a")
        assert await ask(manager, "a") == "first"
        repository.put("a", "second")
        await manager.load("a")
        assert states(manager) == ["a 1 READY"]
        assert await ask(manager, "a") == "second"


async def test_what_keeps_a_load_from_beginning_is_told_as_triton_tells_it(
    tmp_path: Path, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = "failed to load 'a', failed to poll from model repository"
    repository = FakeRepository(tmp_path)
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(ModelNotFoundError, match=f"^{begin}$"):
            await manager.load("a")
        repository.fail = EngineError("the store is down")
        with pytest.raises(EngineError, match=f"^{begin}: the store is down$"):
            await manager.load("a")
        repository.fail = None
        repository.put("a", "first")
        monkeypatch.setattr(repository, "fingerprint", Mock(side_effect=InvalidRequestError("a bad link")))
        with pytest.raises(InvalidRequestError, match=f"^{begin}: a bad link$"):
            await manager.load("a")


async def test_unchanged_models_are_not_loaded_again(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        await asyncio.gather(*(manager.load("a") for _ in range(5)))
        assert len(loader.models) == 1
        loader.models[0].ready = False
        await manager.load("a")
        assert len(loader.models) == 2, "a model that does not work any more is loaded again"


async def test_loads_of_one_model_wait_for_each_other(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader) as manager:
        loader.gate = asyncio.Event()
        loads = [asyncio.create_task(manager.load("a")) for _ in range(3)]
        await until(lambda: loader.waiting == 1)
        assert not any(load.done() for load in loads)
        loader.gate.set()
        await asyncio.gather(*loads)
        assert len(loader.models) == 1


async def test_a_caller_who_leaves_does_not_end_the_load(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader) as manager:
        loader.gate = asyncio.Event()
        load = asyncio.create_task(manager.load("a"))
        await until(lambda: loader.waiting == 1)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        loader.gate.set()
        await until(lambda: manager.versions("a") == [1])


async def test_versions_come_and_go(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "1a", "2a", config="version_policy { latest { num_versions: 2 } }")
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        repository.put("a", "1b", "2b", "3b", config="version_policy { latest { num_versions: 2 } }")
        await manager.load("a")
        assert manager.versions("a") == [2, 3]
        assert [await ask(manager, "a", version) for version in ("", "2", "3")] == ["3b", "2b", "3b"]
        await until(lambda: states(manager)[0] == "a 1 UNAVAILABLE unloaded")
        assert states(manager)[1:] == ["a 2 READY", "a 3 READY"]
        repository.put("a", "1c", config="no_such_field: 1")
        with pytest.raises(InvalidRequestError):
            await manager.load("a")
        assert states(manager)[0] == "a 1 UNAVAILABLE unloaded", "nobody tried to load this one"
        assert all("READY failed to read the model configuration" in state for state in states(manager)[1:])


async def test_a_configuration_that_comes_with_the_request(repository: FakeRepository, loader: FakeLoader) -> None:
    repository.put("a", "one", "two")
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        config = '{"backend": "fake", "version_policy": {"specific": {"versions": [1]}}}'
        await manager.load("a", config=config)
        assert manager.versions("a") == [1]
        for wrong in ("{", "[]", '{"no_such_field": 1}', '{"name": "b"}', "[" * 100_000, '{"backend": 1}', "\ud800"):
            with pytest.raises(InvalidRequestError):
                await manager.load("a", config=wrong)
            assert await ask(manager, "a") == "one"
        await manager.load("a")
        assert manager.versions("a") == [2], "without it the file counts again"


async def test_files_that_come_with_the_request(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        with pytest.raises(
            InvalidRequestError, match="failed to load 'a', failed to poll from model repository: files"
        ):
            await manager.load("a", files=FILES)
        await manager.load("a", config=CONFIG, files=FILES)
        assert await ask(manager, "a") == "uploaded"
        await manager.load("new", config=CONFIG, files={"7/model.txt": b"seven", "7/more/weights.bin": b"\0"})
        assert await ask(manager, "new", "7") == "seven"
        folder = loader.models[-1].config
        assert folder.name == "new"
        assert states(manager) == ["a 1 READY", "new 7 READY"]
        with pytest.raises(ModelNotFoundError):
            await manager.load("new")
        assert await ask(manager, "new") == "seven"
        await manager.load("a")
        assert await ask(manager, "a") == "first"
        with pytest.raises(InvalidRequestError, match="no backend is called"):
            await manager.load("a", config='{"backend": "nope"}', files=FILES)
        assert await ask(manager, "a") == "first"


async def test_unload_is_done_when_new_requests_are_refused(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        old = loader.models[0]
        old.hold = asyncio.Event()
        request = asyncio.create_task(ask(manager, "a"))
        await until(lambda: len(old.requests) == 1)
        await manager.unload("a", unload_dependents=True)
        await manager.unload("a")
        await manager.load("a")
        assert await ask(manager, "a") == "first"
        assert states(manager) == ["a 1 READY"]
        old.hold.set()
        assert await request == "first"
        await until(lambda: old.unloaded)
        assert states(manager) == ["a 1 READY"], "the end of the old one does not touch the new one's state"


async def test_twenty_reloads_and_no_failed_request(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        answers: list[str] = []
        ended = asyncio.Event()

        async def client() -> None:
            while not ended.is_set():
                answers.append(await ask(manager, "a"))
                await asyncio.sleep(0.001)  # threads load models, and need the interpreter for it

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for number in range(20):
            repository.put("a", f"reload {number}")
            await manager.load("a")
            seen = len(answers)
            await until(lambda seen=seen: len(answers) > seen + 20)
        ended.set()
        await asyncio.gather(*clients)
        assert {f"reload {number}" for number in range(20)} <= set(answers)
        assert answers[-1] == "reload 19"


async def test_eight_race_to_load_and_unload(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader) as manager:
        random.seed(7)

        async def racer() -> None:
            for _ in range(200):
                await (manager.load("a") if random.random() < 0.5 else manager.unload("a"))

        await asyncio.gather(*(racer() for _ in range(8)))
        await manager.load("a")
        assert await ask(manager, "a") == "first"
        await until(lambda: len(loader.live) == 1)
        assert repository.open_copies == 1


async def test_models_that_fail_to_stop_are_given_up(
    repository: FakeRepository, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(repository, loader=loader, load_models=("a",)) as manager:
        model = loader.models[0]

        async def broken() -> None:
            model.unloaded = True
            raise EngineError("it clings")

        model.stop = broken  # type: ignore[method-assign]
        await manager.unload("a")
        await until(lambda: states(manager) == ["a 1 UNAVAILABLE unloaded"])
        assert "model a version 1 could not be unloaded" in caplog.text


async def test_the_host_of_the_models(repository: FakeRepository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader) as manager:
        host = manager.host
        assert not host.model_ready("a")
        await host.load_model("a", None, {})
        assert host.model_ready("a")
        assert host.model_ready("a", 1)
        assert not host.model_ready("a", 2)
        assert host.model("a", 1) is manager.model("a")
        await host.load_model("a", CONFIG, FILES)
        assert await ask(manager, "a") == "uploaded"
        await host.unload_model("a", unload_dependents=True)
        with pytest.raises(ModelNotFoundError):
            host.model("a")
        with pytest.raises(ValueError, match="no metrics"):
            host.metric("COUNTER", "n", "", {})


def test_metrics_of_models_go_where_they_are_told(repository: FakeRepository, loader: FakeLoader) -> None:
    metrics = CustomMetrics()
    manager = ModelRepository.__new__(ModelRepository)
    from penstock.gateway.models.repository.host import RepositoryHost

    host = RepositoryHost(manager, metrics)
    host.metric_family("GAUGE", "n", "d")
    found = host.metric("GAUGE", "n", "e", {"a": "b"})
    assert found is metrics.metric("GAUGE", "n", "", {"a": "b"})
    assert [family.text for family in metrics.families()] == ["d"]
