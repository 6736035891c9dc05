"""Loading on demand: a repository, a budget and requests, with models that load at once or when a test lets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import (
    DeadlineExceededError,
    ModelNotFoundError,
    NotReadyError,
    PenstockError,
    PermissionDeniedError,
    QueueFullError,
)
from penstock.gateway.configuration.traffic_rules import ShadowRule, TrafficRule, WeightedTarget
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.memory.budget import Demand, MemoryBudget, MemoryNeeds
from penstock.gateway.models.on_demand.loads import OnDemandSettings
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import Repository
from penstock.gateway.models.traffic.service import TrafficService
from penstock.gateway.models.traffic.store import TrafficStore
from penstock.gateway.models.traffic.table import PublicName
from penstock.gateway.requests.context import ALL_ROLES, USER_ROLES, Principal, RequestContext, Role
from support.kserve_http import kserve_context
from support.repository import CONFIG, FILES, FakeLoader, FakeRepository, loaders_of, states, until

ROOM = 100
"""Bytes. A model's size is in its name, as in `a40`; one without a number takes nothing."""


SEQUENCES = """
backend: "identity"
max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
parameters { key: "penstock_memory" value { string_value: "60" } }
"""


class CountedLoader(FakeLoader):
    """Counts its models in a budget, as the loaders of real ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(ROOM, available=lambda: 10**9)

    async def load(self, context: ModelContext) -> InferModel:
        size = int("".join(filter(str.isdigit, context.name)) or 0)
        place = await self.budget.claim(context.name, Demand(host=MemoryNeeds(weights=size)), lambda: None)
        place.taken = lambda: size
        try:
            model = await super().load(context)
        except BaseException:
            self.budget.release(place)
            raise
        stop = model.stop

        async def stop_and_release() -> None:
            await stop()
            self.budget.release(place)

        model.stop = stop_and_release  # type: ignore[method-assign]
        return model


class Clock:
    """Seconds go by when a test says so, and a moment at each look: what has been loaded in no time is soon safe no
    longer."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class Stand:
    """A server's models. Requests are contexts that use a model until they end."""

    def __init__(self, folder: Path, names: str, **options: Any) -> None:
        self.repository = FakeRepository(folder)
        for name in names.split():
            self.repository.put(name, "tag")
        self.loader = CountedLoader()
        self.clock = Clock()
        self.request_ids = map("request {}".format, count())
        """A public name draws its target by a request's id: these draw the same in every run."""
        self.on_demand = OnDemand(OnDemandSettings(**options.pop("settings", {})), clock=self.clock)
        self.loader.budget.make_room = self.on_demand.make_room
        self.catalogue = Catalogue(on_demand=self.on_demand)
        self.models = ModelRepository(
            RepositorySettings(control_mode="explicit", **options),
            loaders_of(self.loader),
            [self.repository],  # type: ignore[list-item]
            catalogue=self.catalogue,
            on_demand=self.on_demand,
        )

    async def ask(self, name: str, **about: Any) -> RequestContext:
        """A request that has its model, and goes on."""
        context = RequestContext(**about)
        try:
            self.clock.now += 1
            await self.catalogue.admit(name, "", context)
            await self.models.model(name).infer(InferRequest(inputs={}))
        except BaseException:
            context.end()
            raise
        return context

    async def answer(self, name: str, **about: Any) -> None:
        """A request from its beginning to its end."""
        (await self.ask(name, **about)).end()

    async def outcome(self, name: str, **about: Any) -> str:
        try:
            await self.answer(name, **about)
        except PenstockError as error:
            return error.message
        return "ok"

    @property
    def loaded(self) -> list[str]:
        return sorted(line.name for line in self.models.index(ready=True))

    async def waits(self, *tasks: asyncio.Task[Any]) -> None:
        """Returns when so many requests wait for models."""
        await until(lambda: self.on_demand.counts.waiting == len(tasks))


@asynccontextmanager
async def serving(folder: Path, names: str, **options: Any) -> AsyncIterator[Stand]:
    stand = Stand(folder, names, **options)
    try:
        await stand.models.start()
        yield stand
    finally:
        await stand.models.stop()
    assert stand.loader.live == []
    assert stand.loader.budget._reservations == []


async def settle() -> None:
    """What can happen at once has happened."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_request_loads_its_model_once_for_all_that_wait(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40") as stand:
        assert stand.loaded == []
        stand.loader.gate = asyncio.Event()
        tasks = [asyncio.create_task(stand.answer("a40")) for _ in range(20)]
        await stand.waits(*tasks)
        stand.loader.gate.set()
        await asyncio.gather(*tasks)
        assert stand.loaded == ["a40"]
        assert len(stand.loader.models) == 1


async def test_the_least_recently_used_one_makes_room(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40 c40 d90") as stand:
        for name in ("a40", "b40", "a40", "c40"):
            await stand.answer(name)
        assert stand.loaded == ["a40", "c40"]
        assert "b40 1 UNAVAILABLE unloaded to make room" in states(stand.models)
        await stand.answer("d90")
        assert stand.loaded == ["d90"]
        assert dict(stand.on_demand.counts.unloads) == {(name, "room"): 1 for name in ("a40", "b40", "c40")}


async def test_what_is_in_use_stays(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40 c40") as stand:
        used = await stand.ask("a40")
        await stand.answer("b40")
        await stand.answer("c40")
        assert stand.loaded == ["a40", "c40"]
        used.end()
        await stand.answer("b40")
        assert stand.loaded == ["a40", "b40"], "a request uses its model until its end"


async def test_a_request_waits_until_those_that_run_have_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, "a90 b90") as stand:
        used = await stand.ask("a90")
        waiting = asyncio.create_task(stand.answer("b90"))
        await until(lambda: stand.on_demand.is_closing("a90"))
        later = asyncio.create_task(stand.answer("a90"))
        await stand.waits(waiting, later)
        assert stand.loaded == ["a90"], "it takes no new requests, so that the other one has its turn"
        used.end()
        await asyncio.gather(waiting, later)
        assert stand.loaded == ["a90"]
        assert [model.name for model in stand.loader.models] == ["a90", "b90", "a90"]


async def test_no_more_models_are_held_back_than_have_to_go(tmp_path: Path) -> None:
    """Not even when the end of a request makes the model that was chosen the one that was used last."""
    async with serving(tmp_path, "a40 b40 c60") as stand:
        first, second, other = await stand.ask("a40"), await stand.ask("a40"), await stand.ask("b40")
        waiting = asyncio.create_task(stand.answer("c60"))
        await until(lambda: stand.on_demand.is_closing("a40"))
        first.end()
        await settle()  # the load looks again
        assert not stand.on_demand.is_closing("b40")
        await stand.answer("b40")
        second.end()
        await waiting
        assert stand.loaded == ["b40", "c60"]
        other.end()


async def test_requests_of_models_are_never_held_back(tmp_path: Path) -> None:
    """The model that asks is in use for as long as it waits."""
    async with serving(tmp_path, "a90 b90") as stand:
        used = await stand.ask("a90")
        waiting = asyncio.create_task(stand.answer("b90"))
        await until(lambda: stand.on_demand.is_closing("a90"))
        end = await stand.models.host.use_model("a90", None)
        assert stand.models.host.model("a90").name == "a90"
        end()
        used.end()
        await waiting


async def test_nobody_waits_for_a_model_that_can_never_fit(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b120", load_models=("a40",)) as stand:
        told = await stand.outcome("b120")
        assert told.startswith("model 'b120' could not be loaded: version 1 is at UNAVAILABLE state: Resource")
        assert "unload another (a40 0 MiB)" in told
        assert stand.loaded == ["a40"]


async def test_what_is_loaded_at_the_start_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40 c70", load_models=("a40",)) as stand:
        await stand.answer("b40")
        assert "does not fit" in await stand.outcome("c70")
        assert stand.loaded == ["a40", "b40"], "nothing is unloaded in vain"


async def test_a_model_that_came_with_its_files_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b90") as stand:
        await stand.models.load("a40", config=CONFIG, files=FILES)
        assert "does not fit" in await stand.outcome("b90")
        assert stand.loaded == ["a40"]


async def test_a_failed_load_is_told_to_all_and_left_alone_for_a_while(tmp_path: Path) -> None:
    async with serving(tmp_path, "") as stand:
        stand.repository.put("bad", "fail: no weights")
        stand.on_demand._loads._looked = -1e9  # type: ignore[attr-defined]
        found = await asyncio.gather(*(stand.outcome("bad") for _ in range(3)))
        assert len(set(found)) == 1
        assert "no weights" in found[0]
        assert not stand.catalogue.would_load("bad")
        stand.repository.put("bad", "good")
        assert await stand.outcome("bad") == found[0], "it is not tried again yet"
        stand.clock.now += 10
        assert await stand.outcome("bad") == "ok"


async def test_a_load_request_tries_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, "m") as stand:
        stand.loader.broken["m", 1] = [ValueError("no")]
        assert "could not be loaded" in await stand.outcome("m")
        await stand.models.load("m")
        assert await stand.outcome("m") == "ok"


async def test_an_unloaded_model_stays_away_until_it_is_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, "m") as stand:
        await stand.answer("m")
        await stand.models.unload("m")
        assert "has no available versions" in await stand.outcome("m")
        assert not stand.catalogue.would_load("m")
        await stand.models.load("m")
        assert await stand.outcome("m") == "ok"


async def test_callers_without_the_right_load_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, "m") as stand:
        with pytest.raises(PermissionDeniedError):
            await stand.answer("m", principal=Principal(models=("other",)))
        plane = kserve_context(stand.models, names=stand.catalogue).plane
        with pytest.raises(ModelNotFoundError):
            await plane.describe("m", "", RequestContext(principal=Principal(roles=frozenset({Role.METADATA}))))
        assert stand.loader.models == []


async def test_unknown_names_do_not_reach_the_storage_each_time(tmp_path: Path) -> None:
    async with serving(tmp_path, "m") as stand:
        looks = 0
        list_names = stand.repository.model_names

        def counted() -> list[str]:
            nonlocal looks
            looks += 1
            return list_names()

        stand.repository.model_names = counted  # type: ignore[method-assign]
        for number in range(50):
            with pytest.raises(ModelNotFoundError):
                await stand.ask(f"unknown{number}")
        assert looks == 0
        stand.repository.put("new", "tag")
        stand.on_demand._loads._looked = -1e9  # type: ignore[attr-defined]
        await asyncio.gather(*(stand.outcome("new") for _ in range(5)))
        assert stand.loaded == ["new"]


async def test_so_many_requests_wait_and_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path, "m", settings={"most_waiting": 2}) as stand:
        stand.loader.gate = asyncio.Event()
        tasks = [asyncio.create_task(stand.answer("m")) for _ in range(2)]
        await stand.waits(*tasks)
        with pytest.raises(QueueFullError) as full:
            await stand.ask("m")
        assert full.value.retry_after
        stand.loader.gate.set()
        await asyncio.gather(*tasks)


async def test_the_wait_ends_with_the_request_s_time(tmp_path: Path) -> None:
    async with serving(tmp_path, "m", settings={"wait_seconds": 0.01}) as stand:
        stand.loader.gate = asyncio.Event()
        with pytest.raises(DeadlineExceededError):
            await stand.ask("m", deadline=stand.clock.now)
        with pytest.raises(NotReadyError, match="still being loaded") as late:
            await stand.ask("m")
        assert late.value.retry_after
        assert stand.on_demand.counts.refused["time"] == 2
        stand.loader.gate.set()
        await until(lambda: stand.loaded == ["m"])
        assert await stand.outcome("m") == "ok"


async def test_a_load_that_nobody_waits_for_any_more_does_not_wait_for_room(tmp_path: Path) -> None:
    async with serving(tmp_path, "a90 b90") as stand:
        used = await stand.ask("a90")
        waiting = asyncio.create_task(stand.answer("b90"))
        await until(lambda: stand.on_demand.is_closing("a90"))
        waiting.cancel()
        await until(lambda: not stand.on_demand._loading)
        assert dict(stand.on_demand.counts.failed) == {("b90", "no_room"): 1}
        await stand.answer("a90")
        used.end()
        assert [model.name for model in stand.loader.models] == ["a90"]


async def test_waiting_for_room_holds_up_no_load_that_fits(tmp_path: Path) -> None:
    async with serving(tmp_path, "a90 b90 c5", load_threads=1) as stand:
        used = await stand.ask("a90")
        waiting = asyncio.create_task(stand.answer("b90"))
        await until(lambda: stand.on_demand.is_closing("a90"))
        await stand.answer("c5")
        used.end()
        await waiting


TENSORS = """
    input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def put_ensemble(stand: Stand, folder: Path, *models: str) -> None:
    """`whole`, one of these models behind the other."""
    steps, names = "", ["X", *(f"t{number}" for number in range(1, len(models))), "Y"]
    for number, model in enumerate(models):
        stand.repository.put(model, "tag", config=TENSORS)
        maps = [
            f'{kind} {{ key: "{key}" value: "{value}" }}'
            for kind, key, value in (("input_map", "X", names[number]), ("output_map", "Y", names[number + 1]))
        ]
        steps += f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'
    stand.repository.put("whole", "tag")
    text = f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {steps} }}'
    (folder / "whole" / "config.pbtxt").write_text(text)
    stand.on_demand._loads._looked = -1e9  # type: ignore[attr-defined]


async def test_an_ensemble_whose_models_do_not_fit_together_is_refused_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, "c10") as stand:
        put_ensemble(stand, tmp_path, "p60", "q70")
        used = await stand.ask("c10")
        told = await stand.outcome("whole")
        assert "does not fit into memory" in told
        assert "an ensemble needs it at the same time as" in told
        assert not stand.on_demand.is_closing("c10")
        assert {"whole", "c10"} & set(stand.loaded) == {"c10"}
        used.end()


async def test_a_storage_that_hangs_holds_up_no_request_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.models.repository.on_demand_loads._LONGEST_LOOK_SECONDS", 0.01)
    async with serving(tmp_path, "m") as stand:
        answers = threading.Event()
        names = stand.repository.model_names
        stand.repository.model_names = lambda: answers.wait() and names()  # type: ignore[method-assign,return-value]
        stand.on_demand._loads._looked = -1e9  # type: ignore[attr-defined]
        try:
            with pytest.raises(ModelNotFoundError):
                await stand.ask("unknown")
        finally:
            answers.set()


async def test_an_ensemble_in_use_keeps_its_models(tmp_path: Path) -> None:
    async with serving(tmp_path, "c60") as stand:
        put_ensemble(stand, tmp_path, "p50")
        context = RequestContext()
        await stand.on_demand.use("whole", context)
        assert stand.loaded == ["p50", "whole"]
        waiting = asyncio.create_task(stand.answer("c60"))
        await until(lambda: stand.on_demand.is_closing("whole"))
        assert stand.loaded == ["p50", "whole"]
        context.end()
        await waiting
        assert stand.loaded == ["c60"]


async def test_models_that_nobody_uses_are_unloaded_after_a_while(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40", settings={"idle_seconds": 0.01}) as stand:
        used = await stand.ask("a40")
        await stand.answer("b40")
        stand.clock.now += 1
        await until(lambda: "b40 1 UNAVAILABLE unloaded because nobody used it" in states(stand.models))
        assert stand.loaded == ["a40"]
        used.end()
        stand.clock.now += 1
        await until(lambda: stand.loaded == [])


async def test_a_request_lets_its_model_go_when_all_that_use_it_have_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40") as stand:
        await stand.answer("b40")
        mine, another = await stand.ask("a40"), await stand.ask("a40")
        assert stand.on_demand.keep("a40", 0, mine.principal)
        mine.end()
        await settle()
        assert stand.loaded == ["a40", "b40"], "another request uses it"
        another.end()
        await until(lambda: "a40 1 UNAVAILABLE unloaded because nobody used it" in states(stand.models))
        await stand.answer("a40")
        await settle()
        assert stand.loaded == ["a40", "b40"], "it is loaded on demand, and stays as others do"
        assert stand.on_demand.seconds_left("a40") is None


async def test_the_time_that_a_request_says_counts_until_the_model_goes(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40", settings={"idle_seconds": 0.01}) as stand:
        used = [await stand.ask(name) for name in ("a40", "b40")]
        assert stand.on_demand.keep("a40", 60, Principal())
        assert stand.on_demand.keep("b40", None, Principal())
        for context in used:
            context.end()
        stand.clock.now += 58
        await settle()
        assert stand.loaded == ["a40", "b40"]
        assert 0 < (stand.on_demand.seconds_left("a40") or 0) < 2
        assert stand.on_demand.seconds_left("b40") is None
        await stand.answer("a40")
        stand.clock.now += 58
        await settle()
        assert stand.loaded == ["a40", "b40"], "each use begins the time again"
        stand.clock.now += 2
        stand.on_demand._idle_changed.set()  # as the timer would that the clock of this test has not
        await until(lambda: stand.loaded == ["b40"])
        await stand.answer("a40")
        stand.clock.now += 2
        await until(lambda: stand.loaded == ["b40"])


@pytest.mark.parametrize("roles", [ALL_ROLES, USER_ROLES], ids=["admin", "user"])
async def test_only_operators_let_a_model_go_before_it_has_stayed_as_long_as_its_load_took(
    tmp_path: Path, roles: frozenset[Role]
) -> None:
    async with serving(tmp_path, "a40") as stand:
        await stand.answer("a40")
        stand.on_demand._residents.loaded("a40", stand.clock(), 30.0)
        assert stand.on_demand.keep("a40", 0, Principal(roles=roles))
        await settle()
        assert stand.loaded == ([] if Role.ADMIN in roles else ["a40"])
        if stand.loaded:
            stand.clock.now += 30
            stand.on_demand._idle_changed.set()  # as above
            await until(lambda: stand.loaded == [])


async def test_what_stays_loaded_stays_whatever_requests_say(tmp_path: Path) -> None:
    async with serving(tmp_path, "a40 b40 c10", load_models=("a40",)) as stand:
        put_ensemble(stand, tmp_path, "p10")
        assert not stand.on_demand.keep("a40", 0, Principal())
        assert not stand.on_demand.keep("b40", 0, Principal()), "it is not loaded"
        whole = RequestContext()
        await stand.on_demand.use("whole", whole)
        assert stand.on_demand.keep("p10", 0, Principal())
        await settle()
        assert stand.loaded == ["a40", "p10", "whole"], "a request uses the ensemble"
        whole.end()
        await settle()
        assert stand.loaded == ["a40", "p10", "whole"], "nobody lets the ensemble go"


async def test_stopping_ends_the_wait(tmp_path: Path) -> None:
    async with serving(tmp_path, "m") as stand:
        stand.loader.gate = asyncio.Event()
        waiting = asyncio.create_task(stand.ask("m"))
        await stand.waits(waiting)
        await stand.models.stop()
        with pytest.raises(NotReadyError, match="shutting down"):
            await waiting


def test_a_model_stays_as_long_as_it_took_to_load() -> None:
    on_demand = OnDemand(clock=lambda: 1.0)
    on_demand.loaded("m", 7.0, (), kept=False)
    assert on_demand._residents.free(7.9, lambda _: False) == []
    assert on_demand._residents.free(8.0, lambda _: False) == ["m"]


async def test_a_request_is_not_told_what_a_file_holds(tmp_path: Path) -> None:
    stand = Stand(tmp_path, "m")
    stand.repository.put("m", "tag", config="sEcReT: 1")
    await stand.models.start()
    try:
        told = "model 'm' could not be loaded: failed to read the model configuration m/config.pbtxt:2:1"
        assert await stand.outcome("m") == told
        assert "sEcReT" in stand.models.index(ready=False)[0].reason
    finally:
        await stand.models.stop()


async def test_a_model_with_an_open_sequence_stays(tmp_path: Path) -> None:
    for name, extra in (("counts", "sequence_batching { max_sequence_idle_microseconds: 60000000 }"), ("other", "")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(SEQUENCES + extra)
    on_demand, budget = OnDemand(), MemoryBudget(ROOM)
    budget.make_room = on_demand.make_room
    models = ModelRepository(
        RepositorySettings(control_mode="explicit"),
        ClassicLoaders({}, budget=budget),
        [Repository(str(tmp_path))],
        on_demand=on_demand,
    )
    await models.start()

    async def ask(name: str, **sequence: Any) -> None:
        context = RequestContext()
        await on_demand.use(name, context)
        tensor = Tensor("INPUT0", "INT32", np.zeros((1, 1), np.int32))
        await models.model(name).infer(InferRequest(inputs={"INPUT0": tensor}, **sequence))
        context.end()

    try:
        await ask("counts", correlation_id=1, sequence_start=True)
        waiting = asyncio.create_task(ask("other"))
        await until(lambda: any(load.needs_room for load in on_demand._loading.values()))
        await ask("counts", correlation_id=1)
        assert not waiting.done()
        await ask("counts", correlation_id=1, sequence_end=True)
        await waiting
        assert [model.name for model in models.models()] == ["other"]
    finally:
        await models.stop()
    assert budget._reservations == []


def with_rules(stand: Stand, *targets: WeightedTarget, **fields: Any) -> tuple[TrafficStore, PublicName]:
    """`public` leads to these models."""
    rule = TrafficRule("public", targets, **fields)
    traffic = TrafficService([rule], stand.models, DataPlane(stand.catalogue), stand.on_demand)
    return traffic.models, traffic.table.names["public"]


async def ask_public(stand: Stand, store: TrafficStore, **request: Any) -> str:
    """A request for the public name from its beginning to its end, by a key that may use no other; its target."""
    context = RequestContext(id=next(stand.request_ids), principal=Principal(models=("public",)))
    stand.clock.now += 1
    try:
        await stand.catalogue.admit("public", "", context)
        store.model("public")
        sent = InferRequest(inputs={}, caller=context, **request)
        await store.model("public", "", sent).infer(sent)
        return context.record.target
    finally:
        context.end()


async def test_a_public_name_loads_the_target_that_a_request_gets(tmp_path: Path) -> None:
    """Only one of both fits at a time."""
    async with serving(tmp_path, "a60 b60") as stand:
        store, public = with_rules(stand, WeightedTarget("a60"), WeightedTarget("b60"))
        assert stand.catalogue.would_load("public")
        targets = set()
        async with asyncio.timeout(30):
            for _ in range(12):
                target = await ask_public(stand, store)
                assert stand.loaded == [target]
                targets.add(target)
        assert targets == {"a60", "b60"}
        assert sum(each.ended["ok"] for each in public.route.counts.values()) == 12
        with pytest.raises(ModelNotFoundError):
            store.model("a80")


async def test_a_sequence_loads_its_target_and_lets_the_one_go_that_was_only_looked_at(tmp_path: Path) -> None:
    async with serving(tmp_path, "a60 b60") as stand:
        store, _ = with_rules(stand, WeightedTarget("a60"), WeightedTarget("b60"))
        async with asyncio.timeout(30):
            targets = [await ask_public(stand, store, correlation_id=number) for number in range(1, 9)]
            again = [await ask_public(stand, store, correlation_id=number) for number in range(1, 9)]
        assert set(targets) == {"a60", "b60"}
        assert again == targets


async def test_a_target_that_cannot_be_loaded_gives_its_share_to_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path, "bad good") as stand:
        stand.repository.put("bad", "fail: broken")
        store, public = with_rules(stand, WeightedTarget("bad", weight=1000), WeightedTarget("good"))
        with pytest.raises(NotReadyError, match="model 'bad' could not be loaded"):
            await ask_public(stand, store)
        assert await ask_public(stand, store) == "good"
        assert "broken" in public.unavailable["bad"]


async def test_a_shadow_is_loaded_for_its_first_request_and_let_go(tmp_path: Path) -> None:
    async with serving(tmp_path, "a20 b20") as stand:
        store, public = with_rules(stand, WeightedTarget("a20"), shadow=ShadowRule("b20"))
        assert await ask_public(stand, store) == "a20"
        assert public.shadows is not None
        shadows = public.shadows
        await until(lambda: not shadows.in_flight)
        assert shadows.results == {"equal": 1}
        assert stand.loaded == ["a20", "b20"]
        assert not stand.on_demand._residents.used("b20")


async def test_requests_of_models_load_the_target_that_they_get(tmp_path: Path) -> None:
    async with serving(tmp_path, "a60 b60") as stand:
        store, _ = with_rules(stand, WeightedTarget("a60"), WeightedTarget("b60"))
        seen = set()
        async with asyncio.timeout(30):
            for _ in range(12):
                stand.clock.now += 1
                client = RequestContext(id=next(stand.request_ids))
                end = await stand.catalogue.use_for_model("public", None)
                sent = InferRequest(inputs={}, origin=client)
                await store.model("public", "", sent).infer(sent)
                end()
                [target] = stand.loaded
                assert not stand.on_demand._residents.used(target)
                seen.add(target)
        assert seen == {"a60", "b60"}
