"""The catalogue of names: whose a name is, and the way of a request to what serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import support.pooling
from penstock.classic.base import InferModel
from penstock.engines.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    PermissionDeniedError,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Kind, Served, Traffic, Upstream
from penstock.gateway.models.language.adapters import AdapterSet, new_adapter
from penstock.gateway.models.language.models import LoadedModel, NameHolder
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.repository.models import LoadedVersions
from penstock.gateway.requests.context import Principal, RequestContext
from support.dataplane import Setup
from support.pooling import FakeSource, served


def language_model(folder: Path, *names: str, adapters: tuple[str, ...] = (), loaded: bool = True) -> LoadedModel:
    model = Setup(folder / names[0], SchedulerConfig(), 16).model
    model.names, model.loaded = names, loaded
    model.adapters = AdapterSet([new_adapter(name, folder) for name in adapters])
    return model


OTHER = RequestContext(principal=Principal(models=("other",)))
"""Of a key that may use none of these models."""


def upstream(name: str, *apis: str, gives_way: bool = False) -> Upstream:
    return cast("Upstream", SimpleNamespace(name=name, apis=apis, gives_way=gives_way, refusal="{name} is far away"))


class Steps:
    """Rules for `public`, and loading on demand, which keep what they were asked."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.taken: list[str] = []
        self.catalogue = catalogue

    def has(self, name: str) -> bool:
        return name == "public"

    def target(self, name: str, kind: Kind, context: RequestContext) -> Target:
        self.taken.append(f"target of {name}")
        return Target("own")

    def serving(self, context: RequestContext, kind: Kind) -> Served | None:
        return self.catalogue.own("own", kind).served

    def models(self, name: str) -> list[str]:
        return ["own", "spare"]

    def tensors_target(self, name: str, version: str, context: RequestContext) -> str | None:
        self.taken.append(f"target of {name} {version}")
        return "own" if version == "1" else None

    def may_generate(self, name: str) -> bool:
        return True

    async def offers(self, name: str) -> bool:
        self.taken.append(f"offers {name}")
        if name == "own":
            raise NotReadyError("own is broken")
        return name == "spare"

    def would_load(self, name: str) -> bool:
        return name == "spare"

    async def use_for_model(self, name: str, deadline: float | None) -> Callable[[], None]:
        self.taken.append(f"load {name}")
        return lambda: self.taken.append(f"end {name}")

    async def use(self, name: str, context: RequestContext) -> None:
        self.taken.append(f"load {name}")


@pytest.fixture
def own(tmp_path: Path) -> LoadedModel:
    return language_model(tmp_path, "own", "alias", adapters=("adapter",))


@pytest.fixture
def steps() -> Steps:
    catalogue = Catalogue(on_demand=cast("OnDemand", SimpleNamespace()))
    steps = Steps(catalogue)
    catalogue._on_demand, catalogue.traffic = cast("OnDemand", steps), cast("Traffic", steps)
    return steps


async def test_a_request_goes_by_permission_target_and_load_in_this_order(steps: Steps, own: LoadedModel) -> None:
    catalogue = steps.catalogue
    catalogue.add(own)
    with pytest.raises(PermissionDeniedError):
        await catalogue.find("public", Kind.CHAT, RequestContext(principal=Principal(models=("own",))))
    assert steps.taken == []
    context = RequestContext(principal=Principal(models=("public",)))
    entry = await catalogue.find("public", Kind.CHAT, context)
    assert steps.taken == ["target of public", "load own"]
    assert (entry.name, entry.served) == ("public", NameHolder(own))
    assert catalogue.resolved("public", Kind.CHAT, context) is context.entry is entry
    assert len(steps.taken) == 2, "what is behind reads the entry in the context"


async def test_tensors_go_by_the_same_steps(steps: Steps) -> None:
    catalogue = steps.catalogue
    for take in (catalogue.admit("public", "1", OTHER), catalogue.offers("public", OTHER)):
        with pytest.raises(PermissionDeniedError):
            await take
    assert steps.taken == []
    context = RequestContext(principal=Principal(models=("public",)))
    await catalogue.admit("public", "1", context)
    await catalogue.admit("public", "2", context)
    assert steps.taken == ["target of public 1", "load own", "target of public 2"], "no target has the version 2"
    await catalogue.admit("plain", "1", RequestContext())
    assert steps.taken[3:] == ["load plain"]
    await catalogue.admit("plain", "1", RequestContext(), loads=False)
    assert len(steps.taken) == 4


async def test_a_name_with_rules_offers_what_any_of_its_models_does(steps: Steps) -> None:
    assert await steps.catalogue.offers("public", RequestContext())
    assert steps.taken == ["offers own", "offers spare"]
    assert not await steps.catalogue.offers("plain", RequestContext())
    with pytest.raises(NotReadyError, match="own is broken"):
        await steps.catalogue.offers("own", RequestContext())
    assert [steps.catalogue.would_load(name) for name in ("public", "spare", "plain")] == [True, True, False]


async def test_a_model_that_asks_a_name_with_rules_keeps_none_of_its_models(steps: Steps) -> None:
    end = await steps.catalogue.use_for_model("plain", None)
    end()
    (await steps.catalogue.use_for_model("public", None))()
    ends = ["load plain", "end plain", "load own", "end own", "load spare", "end spare"]
    assert steps.taken == ends, "neither is there afterwards"
    steps.catalogue.publish("spare", LoadedVersions({1: cast("InferModel", SimpleNamespace())}))
    await steps.catalogue.use_for_model("public", None)
    assert steps.taken == ends, "one that serves tells what all are like"


async def test_without_loading_on_demand_tensors_need_the_permission_alone() -> None:
    catalogue = Catalogue()
    assert not catalogue.loads
    with pytest.raises(PermissionDeniedError):
        await catalogue.admit("m", "", OTHER)
    await catalogue.admit("m", "", RequestContext())
    assert not await catalogue.offers("m", RequestContext())
    assert not catalogue.would_load("m")
    (await catalogue.use_for_model("m", None))()


async def test_a_key_learns_nothing_of_names_that_it_may_not_use(own: LoadedModel) -> None:
    catalogue = Catalogue()
    catalogue.add(own)
    for name in ("own", "nothing"):
        with pytest.raises(PermissionDeniedError):
            await catalogue.find(name, Kind.CHAT, RequestContext(principal=Principal(models=("other",))))


async def test_a_model_that_was_replaced_meanwhile_gets_no_request(tmp_path: Path, own: LoadedModel) -> None:
    catalogue, context = Catalogue(), RequestContext()
    catalogue.add(own)
    await catalogue.find("own", Kind.CHAT, context)
    newer = language_model(tmp_path / "newer", "own")
    catalogue.add(newer)
    assert catalogue.language("own", context).model is own, "it still serves"
    catalogue.remove(own)
    assert catalogue.language("own", context).model is newer
    catalogue.remove(newer)
    with pytest.raises(ModelNotFoundError):
        catalogue.language("own", context)


async def test_an_adapter_that_was_unloaded_meanwhile_is_unknown(own: LoadedModel) -> None:
    catalogue, context = Catalogue(), RequestContext()
    catalogue.add(own)
    [adapter] = own.adapters
    assert (await catalogue.find("adapter", Kind.CHAT, context)).served == NameHolder(own, adapter)
    own.adapters.remove(adapter)
    with pytest.raises(ModelNotFoundError):
        catalogue.language("adapter", context)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("own", Kind.EMBEDDINGS, "generates text and gives no embeddings"),
        ("vectors", Kind.CHAT, "gives embeddings or scores and generates no text"),
        ("far", Kind.TOKENS, "far is far away"),
        ("far", Kind.SCORES, "far is far away"),
    ],
)
async def test_models_of_another_kind_are_refused_by_name(
    tmp_path: Path, own: LoadedModel, name: str, kind: Kind, message: str
) -> None:
    catalogue = Catalogue()
    for model in (own, served(support.pooling.tokenizer(tmp_path), "vectors", FakeSource()), upstream("far", "chat")):
        catalogue.add(model)
    with pytest.raises(InvalidRequestError, match=message):
        await catalogue.find(name, kind, RequestContext())


def test_names_are_taken_across_kinds(tmp_path: Path, own: LoadedModel) -> None:
    catalogue, tokenizer = Catalogue(), support.pooling.tokenizer(tmp_path)
    catalogue.add(own)
    vectors = served(tokenizer, "vectors", FakeSource())
    catalogue.add(vectors)
    catalogue.add(vectors)  # it has its names already
    clashes: list[Any] = [
        served(tokenizer, "own", FakeSource()),
        served(tokenizer, "adapter", FakeSource()),
        served(tokenizer, "vectors", FakeSource()),
        upstream("alias", "chat"),
        upstream("vectors", "embeddings"),
        language_model(tmp_path / "new", "vectors"),
        language_model(tmp_path / "newer", "new", adapters=("vectors",)),
    ]
    for model in clashes:
        with pytest.raises(AlreadyExistsError):
            catalogue.add(model)
    assert [name for name, _ in catalogue.listed()] == ["own", "alias", "adapter", "vectors"]


def test_one_of_another_server_replaces_its_like_and_what_takes_text_as_tensors() -> None:
    catalogue = Catalogue()
    models = [upstream("m", "chat", gives_way=True), upstream("m", "chat"), upstream("m", "completions")]
    for model in models:
        catalogue.add(model)
        assert catalogue.first("m") is model
    catalogue.remove(models[1])
    assert catalogue.first("m") is models[2], "the name is another's by now"


def test_tensors_and_texts_of_a_name_are_one_entry(own: LoadedModel) -> None:
    catalogue = Catalogue()
    tensors = LoadedVersions({1: cast("InferModel", SimpleNamespace())})
    catalogue.publish("own", tensors)
    assert "own" not in catalogue, "KServe alone knows it"
    catalogue.add(own)
    assert catalogue.deployments() == [("own", tensors)]
    catalogue.remove(own)
    assert (catalogue.model("own"), catalogue.deployment("own")) == (None, tensors)
    catalogue.publish("own", None)
    assert catalogue.deployments() == []


def test_an_adapter_of_a_name_that_becomes_free_gets_it(tmp_path: Path, own: LoadedModel) -> None:
    catalogue = Catalogue()
    catalogue.add(own)
    far = upstream("late", "chat")
    catalogue.add(far)
    own.adapters.put(new_adapter("late", tmp_path))  # an engine elsewhere has got it
    assert catalogue.first("late") is far
    catalogue.remove(far)
    assert catalogue.holder("late") == NameHolder(own, own.adapters.get("late"))


def test_a_model_that_loads_says_so(tmp_path: Path) -> None:
    catalogue = Catalogue()
    model = language_model(tmp_path, "m", loaded=False)
    catalogue.add(model)
    assert ("m" in catalogue, catalogue.listed()) == (True, [])
    with pytest.raises(NotReadyError, match="still loading"):
        catalogue.first("m")
    catalogue.serve(model)
    assert catalogue.first("m") == NameHolder(model)
