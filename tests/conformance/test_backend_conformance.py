"""What every backend of classic models must do, over a model repository of files as the server reads it.

`backend_candidates` says how to put another backend under it. A backend whose packages are not installed is skipped.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from backend_candidates import BACKENDS, MORE, candidate
from backend_candidates.candidate import HEAVY_BYTES, MAX_BATCH_SIZE, Arrays, Candidate, Extra
from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Array, Tensor, datatype_of
from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import Repository
from support.classic import until

NAME = "m"
T = TypeVar("T")


@dataclass
class Rig:
    """A repository with one model, `m`, of the backend under test."""

    backend: Candidate
    folder: Path
    repository: ModelRepository = field(init=False)

    def write(self, *numbers: int, config: str | None = None, more: str = "") -> None:
        """Versions 1, 2, ... with these numbers. `config` in place of the candidate's, `more` behind it."""
        for version, number in enumerate(numbers, 1):
            self.backend.write(self.folder / NAME / str(version), number)
        self.configure(self.backend.config if config is None else config, more)

    def configure(self, config: str, more: str = "") -> None:
        (self.folder / NAME).mkdir(exist_ok=True)
        text = f'backend: "{self.backend.backend}"\n{config}\n{more}'
        if "instance_group" not in text:
            text += "\ninstance_group { kind: KIND_CPU }"
        (self.folder / NAME / "config.pbtxt").write_text(text)

    def write_extra(self, extra: Extra) -> None:
        extra.write(self.folder / NAME / "1")
        self.configure(extra.config)

    async def load(self) -> InferModel:
        await self.repository.load(NAME)
        return self.repository.model(NAME)

    async def unload(self) -> None:
        """Returns when all of it is gone."""
        await self.repository.unload(NAME)
        await until(lambda: all(line.state == "UNAVAILABLE" for line in self.repository.index(ready=False)))

    async def check(self, number: int = 1, version: str = "", rows: int = 2, seed: int = 0) -> None:
        """One request, and the answer that it must have."""
        inputs = self.backend.rows(np.random.default_rng(seed), rows)
        self.compare(await ask(self.repository.model(NAME, version), inputs), inputs, number)

    def compare(self, found: Arrays, inputs: Arrays, number: int = 1) -> None:
        wanted = self.backend.expect(inputs, number)
        assert sorted(found) == sorted(wanted)
        for name, array in wanted.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_allclose(found[name], array, rtol=self.backend.tolerance, atol=self.backend.tolerance)


@pytest.fixture(params=[*BACKENDS, *(MORE if os.environ.get("PENSTOCK_ALL_BACKENDS") else ())])
def backend(request: pytest.FixtureRequest) -> Candidate:
    for package in (BACKENDS | MORE)[request.param]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return candidate(request.param)


@pytest.fixture
async def rig(backend: Candidate, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(backend, tmp_path) as found:
        yield found


@asynccontextmanager
async def serving(backend: Candidate, folder: Path) -> AsyncIterator[Rig]:
    rig = Rig(backend, folder)
    settings = RepositorySettings(control_mode="explicit")
    rig.repository = ModelRepository(settings, ClassicLoaders({}), [Repository(str(folder))])
    await rig.repository.start()
    try:
        yield rig
    finally:
        await rig.repository.stop()


def request(inputs: Arrays, *outputs: str) -> InferRequest:
    for array in inputs.values():
        array.flags.writeable = False  # as what lies in a request's body
    tensors = {name: Tensor(name, datatype_of(array.dtype), array) for name, array in inputs.items()}
    return InferRequest(inputs=tensors, outputs=outputs)


async def ask(model: InferModel, inputs: Arrays, *outputs: str) -> dict[str, Array]:
    response = await model.infer(request(inputs, *outputs))
    assert response.error is None
    return {tensor.name: tensor.array for tensor in response.outputs or ()}


def needed(ability: T | None) -> T:
    if ability is None:
        pytest.skip("the backend has nothing of the kind")
    return ability


async def test_batches_answer_as_single_requests_do(rig: Rig) -> None:
    rig.write(1, more="instance_group { kind: KIND_CPU count: 1 }")
    model = await rig.load()
    random = np.random.default_rng(1)
    asked = [rig.backend.rows(random, 1 + number % 3) for number in range(24)]
    alone = [await ask(model, inputs) for inputs in asked]
    executed = model.statistics.execution_count
    together = await asyncio.gather(*(ask(model, inputs) for inputs in asked))
    assert model.statistics.execution_count - executed < len(asked), "nothing was batched"
    for inputs, first, second in zip(asked, alone, together, strict=True):
        rig.compare(first, inputs)
        rig.compare(second, inputs)
    assert model.statistics.success.count == 2 * len(asked)


async def test_a_request_gets_the_outputs_that_it_asked_for(rig: Rig) -> None:
    rig.write(1)
    model = await rig.load()
    inputs = rig.backend.rows(np.random.default_rng(0), 1)
    wanted = rig.backend.expect(inputs, 1)
    one_each = await asyncio.gather(*(ask(model, inputs, name) for name in wanted))
    assert [list(found) for found in one_each] == [[name] for name in wanted]


async def test_what_does_not_fit_is_refused_and_its_neighbours_are_not(rig: Rig) -> None:
    rig.write(1)
    model = await rig.load()
    good = rig.backend.rows(np.random.default_rng(2), 1)
    name = next(name for name, array in good.items() if array.dtype == np.float32)
    array = good[name]
    bad: list[Mapping[str, Array]] = [
        {**good, name: np.concatenate([array, array], axis=1)},
        {**good, name: array[0]},
        {**good, name: array.astype(np.float64)},
        {**good, "NOBODY": array},
        {other: found for other, found in good.items() if other != name},
        rig.backend.rows(np.random.default_rng(2), MAX_BATCH_SIZE + 1),
        {other: found[:0] for other, found in good.items()},
    ]
    answers = await asyncio.gather(*(ask(model, inputs) for inputs in [good, *bad, good]), return_exceptions=True)
    assert [isinstance(answer, InvalidRequestError) for answer in answers] == [False, *[True] * len(bad), False]
    for answer in (answers[0], answers[-1]):
        assert isinstance(answer, dict)
        rig.compare(answer, good)


async def test_an_execution_that_fails_costs_only_the_guilty_request(rig: Rig) -> None:
    poison = needed(rig.backend.poison)()
    rig.write(1)
    model = await rig.load()
    random = np.random.default_rng(3)
    asked = [rig.backend.rows(random, 1) for _ in range(12)]
    asked.insert(5, poison)
    answers = await asyncio.gather(*(ask(model, inputs) for inputs in asked), return_exceptions=True)
    for inputs, answer in zip(asked, answers, strict=True):
        if inputs is poison:
            assert isinstance(answer, PenstockError)
            assert str(rig.folder) not in str(answer)
            assert "Traceback" not in str(answer)
        else:
            assert isinstance(answer, dict), answer
            rig.compare(answer, inputs)
    await rig.check()


async def test_several_instances_answer_alike(rig: Rig) -> None:
    rig.write(1, more="instance_group { kind: KIND_CPU count: 3 }")
    model = await rig.load()
    assert model.config.instance_group[0].count == 3
    await asyncio.gather(*(rig.check(rows=1 + seed % MAX_BATCH_SIZE, seed=seed) for seed in range(18)))


async def test_versions_serve_side_by_side(rig: Rig) -> None:
    rig.write(1, 2, more="version_policy { all { } }")
    await rig.load()
    assert rig.repository.versions(NAME) == [1, 2]
    if rig.backend.numbered:
        await asyncio.gather(rig.check(1, "1"), rig.check(2, "2"), rig.check(2, ""))


async def test_a_reload_takes_the_new_files_and_loses_no_request(rig: Rig) -> None:
    rig.write(1)
    await rig.load()
    ended = asyncio.Event()
    errors: list[BaseException] = []

    async def client() -> None:
        inputs = rig.backend.rows(np.random.default_rng(4), 1)
        while not ended.is_set():
            try:
                await ask(rig.repository.model(NAME), inputs)
            except PenstockError as error:
                errors.append(error)
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as clients:
        clients.create_task(client())
        await rig.check(1)
        rig.write(3)
        await rig.load()
        if rig.backend.numbered:
            await rig.check(3)
        ended.set()
    assert errors == []


async def test_files_that_cannot_be_loaded_leave_what_serves_as_it_was(rig: Rig) -> None:
    broken = needed(rig.backend.write_broken)
    rig.write(1)
    await rig.load()
    broken(rig.folder / NAME / "1")
    with pytest.raises(PenstockError) as refused:
        await rig.load()
    assert str(rig.folder) not in str(refused.value)
    await rig.check(1)


async def test_what_the_files_tell_is_completed(rig: Rig) -> None:
    sparse = needed(rig.backend.sparse)
    rig.write(1)
    whole = (await rig.load()).config
    rig.write(1, config=sparse)
    found = (await rig.load()).config
    for field_name in ("max_batch_size", "input", "output", "dynamic_batching"):
        assert getattr(found, field_name) == getattr(whole, field_name), field_name
    await rig.check(1)


async def test_strings_come_back_as_they_went_in(rig: Rig) -> None:
    rig.write_extra(needed(rig.backend.strings))
    model = await rig.load()
    asked = [np.array([[text.encode(), b""]], np.object_) for text in ("a", "Grüße", "x" * 1000, "日本")]
    answers = await asyncio.gather(*(ask(model, {"INPUT0": array}) for array in asked))
    for array, answer in zip(asked, answers, strict=True):
        assert answer["OUTPUT0"].tolist() == array.tolist()


async def test_a_decoupled_model_sends_any_number_of_responses(rig: Rig) -> None:
    rig.write_extra(needed(rig.backend.decoupled))
    model = await rig.load()

    async def values(count: int) -> list[int]:
        stream = model.stream(request({"INPUT0": np.array([count], np.int32)}))
        return [int(tensor.array[0]) async for response in stream for tensor in response.outputs or ()]

    assert await asyncio.gather(*map(values, (3, 0, 1, 5))) == [[*range(count)] for count in (3, 0, 1, 5)]


def pool_threads() -> int:
    """Of asyncio's own pool, which grows by itself."""
    return sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())


_ARENA_MAX = -8
"""mallopt(3)."""


@pytest.fixture
def one_arena() -> None:
    """No new arena of glibc's for each new thread, of which there may be eight for each core. `malloc_trim` gives back
    what is free at the end of the first one only: under load, several models one after the other that are loaded in
    threads stayed in as many arenas."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_ARENA_MAX, 1)


def give_back_free_memory() -> None:
    """The C library keeps what was freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.mark.usefixtures("one_arena")
async def test_what_is_unloaded_leaves_nothing_behind(rig: Rig) -> None:
    """Memory, threads, files and processes. With heavy weights a load that stays would be noticed at once."""
    rig.write(1)
    heavy = rig.backend.write_heavy
    if heavy is not None:
        heavy(rig.folder / NAME / "1")
    process = psutil.Process()

    async def cycle() -> dict[str, Any]:
        await rig.load()
        await rig.check()
        await rig.unload()
        gc.collect()
        give_back_free_memory()
        return {
            "memory": process.memory_info().rss,
            "threads": process.num_threads() - pool_threads(),
            "files": process.num_fds(),
            "processes": len(process.children(recursive=True)),
        }

    for _ in range(2 if heavy else 1):
        after = await cycle()
    # What a load leaves behind, each one does. The allocator keeps memory for a while, and libraries start threads of
    # their own, once: so cycles in which nothing grows may come late.
    most, wanted = (HEAVY_BYTES / 2, 2) if heavy else (3 * HEAVY_BYTES, 1)
    bounds = {"memory": most, "threads": 1, "files": 1, "processes": 1}
    growth: dict[str, list[int]] = {what: [] for what in bounds}

    def steady(what: str) -> bool:
        return sum(each < bounds[what] for each in growth[what]) >= wanted

    for _ in range(6 * wanted):
        before, after = after, await cycle()
        for what in bounds:
            growth[what].append(after[what] - before[what])
        if all(map(steady, bounds)):
            break
    assert all(map(steady, bounds)), growth
