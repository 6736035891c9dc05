"""Ensembles in a repository: loaded after their models, unavailable without them, back when those are."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError
from penstock.gateway.models.repository.manager import ModelRepository
from support.repository import FakeLoader, FakeRepository, serving, states, until

IO = 'input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }'


def step(model: str, source: str, target: str) -> str:
    maps = f'input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{target}" }}'
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }}'


class Repository(FakeRepository):
    def put_ensemble(self, name: str, *models: str) -> None:
        """Of these models, one behind the other."""
        places = ["X", *(f"t{n}" for n in range(1, len(models))), "Y"]
        steps = " ".join(step(model, *places[n : n + 2]) for n, model in enumerate(models))
        self.put(name, "", config=f"{IO} ensemble_scheduling {{ {steps} }}")
        (self.folder / name / "config.pbtxt").write_text(f'platform: "ensemble" {IO} ensemble_scheduling {{ {steps} }}')


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    found = Repository(tmp_path)
    for name in ("a", "b"):
        found.put(name, name, config=IO)
    found.put_ensemble("e", "a", "b")
    return found


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


async def test_an_ensemble_is_loaded_after_its_models_whatever_the_order(
    repository: Repository, loader: FakeLoader
) -> None:
    repository.put_ensemble("0", "e", "a")
    async with serving(repository, loader=loader, control_mode="none", load_threads=1) as manager:
        assert manager.ready
        assert states(manager) == [f"{name} 1 READY" for name in "0abe"]
        assert len(loader.models) == 2


async def test_a_step_cannot_be_a_name_that_has_only_traffic_rules(repository: Repository, loader: FakeLoader) -> None:
    repository.put_ensemble("f", "a", "split")
    async with serving(repository, loader=loader) as manager:
        manager.host.route(manager, {"split"}.__contains__)
        with pytest.raises(PenstockError, match="'split' is a name with traffic rules"):
            await manager.load("f")


async def test_a_load_request_for_an_ensemble_loads_its_models_and_one_for_its_models_unloads_them(
    repository: Repository, loader: FakeLoader
) -> None:
    async with serving(repository, loader=loader) as manager:
        await manager.load("a")
        await manager.load("e")
        assert states(manager) == ["a 1 READY", "b 1 READY", "e 1 READY"]
        await manager.unload("e")
        assert [line for line in states(manager) if "READY" in line] == ["a 1 READY", "b 1 READY"]
        await manager.load("e")
        await manager.unload("e", unload_dependents=True)
        assert [line for line in states(manager) if "READY" in line] == ["a 1 READY"]


async def test_an_ensemble_goes_with_its_models_and_comes_back_with_them(
    repository: Repository, loader: FakeLoader
) -> None:
    repository.put_ensemble("f", "e")
    async with serving(repository, loader=loader, load_models=("f",)) as manager:
        await manager.unload("b")
        await manager.unload("a")
        await until(lambda: "UNLOADING" not in str(states(manager)))
        assert states(manager) == [
            "a 1 UNAVAILABLE unloaded",
            "b 1 UNAVAILABLE unloaded",
            "e 1 UNAVAILABLE its model 'b' was unloaded",
            "f 1 UNAVAILABLE its model 'e' was unloaded",
        ]
        assert manager.ready
        await manager.load("a")
        assert [line for line in states(manager) if "READY" in line] == ["a 1 READY"]
        await manager.load("b")
        await until(lambda: "f 1 READY" in states(manager))
        assert states(manager) == [f"{name} 1 READY" for name in "abef"]
        await manager.unload("e")
        await manager.unload("a")
        await manager.load("a")
        await until(lambda: "e 1 UNAVAILABLE unloaded" in states(manager))


async def test_an_ensemble_of_an_ensemble_and_of_one_of_its_models(repository: Repository, loader: FakeLoader) -> None:
    repository.put_ensemble("f", "e", "a")
    async with serving(repository, loader=loader, load_models=("f",)) as manager:
        await manager.unload("a")
        await until(lambda: "UNLOADING" not in str(states(manager)))
        assert [line for line in states(manager) if "READY" in line] == ["b 1 READY"]
        await manager.load("a")
        await until(lambda: "f 1 READY" in states(manager))
        repository.put("a", "a", config=IO.replace("INT32", "FP32", 1))
        await manager.load("a")
        assert [line for line in states(manager) if "READY" in line] == ["a 1 READY", "b 1 READY"]
        repository.put("a", "a", config=IO)
        await manager.load("a")
        await until(lambda: "f 1 READY" in states(manager))


async def test_a_model_that_becomes_decoupled_makes_all_ensembles_above_it_decoupled(
    repository: Repository, loader: FakeLoader
) -> None:
    repository.put_ensemble("f", "e")
    repository.put_ensemble("g", "f")
    async with serving(repository, loader=loader, load_models=("g",)) as manager:
        for decoupled in (True, False):
            policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
            repository.put("a", "a", config=f"{IO} {policy}")
            await manager.load("a")
            assert [manager.model(name).signature.decoupled for name in "aefg"] == [decoupled] * 4


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (("nowhere", "a"), "load failed for model 'e': ensemble e contains models that are not available .*: nowhere"),
        (("broken",), "'e' depends on 'broken' which has no loaded version. Model 'broken' loading .*: .*no good"),
        (("e",), "circular dependency between ensembles: e -> e"),
        (("f",), "circular dependency between ensembles: f -> e -> f"),
        (("wide",), r"tensor X: inconsistent shape: \[1\] is inferred from model e while \[2\] is inferred"),
    ],
)
async def test_what_an_ensemble_cannot_be_made_of(
    repository: Repository, loader: FakeLoader, models: tuple[str, ...], told: str
) -> None:
    repository.put("broken", "fail: no good", config=IO)
    repository.put("wide", "w", config=IO.replace("[ 1 ]", "[ 2 ]", 1))
    repository.put_ensemble("f", "e")
    repository.put_ensemble("e", *models)
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(InvalidRequestError, match=told):
            await manager.load("e")
        assert not [line for line in states(manager) if line.startswith("e") and "READY" in line]
    with pytest.raises(EngineError, match=r"(?s)failed to load all models.*\n  e: "):
        async with serving(repository, loader=loader, control_mode="none"):
            pass


async def test_a_cycle_that_a_reload_would_close(repository: Repository, loader: FakeLoader) -> None:
    repository.put_ensemble("f", "e")
    async with serving(repository, loader=loader, load_models=("f",)) as manager:
        repository.put_ensemble("e", "f")
        with pytest.raises(InvalidRequestError, match="circular dependency between ensembles: e -> f -> e"):
            await manager.load("e")
        assert [line.partition(" READY")[0] for line in states(manager)] == [f"{name} 1" for name in "abef"]


async def test_a_model_that_no_longer_fits_takes_its_ensemble_away(repository: Repository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("e",)) as manager:
        repository.put("b", "b", config=IO.replace("INT32", "FP32", 1))
        await manager.load("b")
        assert "inconsistent data type: TYPE_INT32" in states(manager)[2]
        repository.put("b", "b", config=IO)
        await manager.load("b")
        assert states(manager)[2] == "e 1 READY"


async def test_polls_load_an_ensemble_when_its_last_model_has_come(repository: Repository, loader: FakeLoader) -> None:
    stamp = repository.stamps.pop("b")
    async with serving(repository, loader=loader, control_mode="poll", exit_on_error=False) as manager:
        assert not manager.ready
        repository.stamps["b"] = stamp
        await manager.poll()
        await until(lambda: manager.ready)
        repository.remove("a")
        await manager.poll()
        assert "e" not in [model.name for model in manager.models()]


async def test_a_request_ends_with_the_models_that_it_began_with(repository: Repository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("e",)) as manager:
        a, b = sorted(loader.models, key=lambda model: model.name)
        for each in (a, b):
            each.outputs = [Tensor("Y", "INT32", np.array([1], np.int32))]
        a.hold = asyncio.Event()
        asked = asyncio.create_task(_ask(manager))
        await until(lambda: bool(a.requests))
        repository.put("b", "b2", config=IO)
        await manager.load("b")
        await manager.unload("b")
        still_there = b.ready
        a.hold.set()
        assert still_there
        response = await asked
        assert response.outputs is not None
        assert [len(each.requests) for each in (a, b)] == [1, 1]
        await until(lambda: b.unloaded)


async def _ask(manager: ModelRepository) -> InferResponse:
    return await manager.model("e").infer(InferRequest(inputs={"X": Tensor("X", "INT32", np.array([1], np.int32))}))


async def test_a_model_that_is_unloaded_while_its_ensemble_loads(repository: Repository, loader: FakeLoader) -> None:
    async with serving(repository, loader=loader, load_models=("a", "b")) as manager:
        loading = asyncio.create_task(manager.load("e"))
        await until(lambda: "e 1 LOADING" in states(manager))
        await manager.unload("a")
        with contextlib.suppress(InvalidRequestError):
            await loading
        assert not [line for line in states(manager) if line.startswith("e 1 READY")]
