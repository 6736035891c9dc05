"""Adapters that come and go under running requests: the data plane over the simulated engine, in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import (
    AlreadyExistsError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    UnsupportedError,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.adapter_control import AdapterControl
from penstock.gateway.models.language.adapters import AdapterSet, new_adapter
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import Tokenizer
from protocol.asgi_client import AsgiCall, call
from support.adapters import save_adapter
from support.dataplane import Setup, request

MAX_LORAS = 3


class Shop:
    """A data plane with one model, whose adapters `one`, `two`, ... lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shop"
        for name in ("one", "two", "three", "four"):
            save_adapter(self.folder / name)
        self.setup = Setup(folder / "model", SchedulerConfig(), 64, MAX_LORAS)
        self.setup.take_adapters(AdapterSet(directory=self.folder, max_loaded=MAX_LORAS))
        self.plane = self.setup.plane
        self.control = AdapterControl(self.plane)
        self.engine: Any = self.setup.engine

    async def start(self) -> Shop:
        await self.engine.start()
        self.setup.model.loaded = True
        return self

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.plane.models.served()]

    @property
    def in_engine(self) -> list[str]:
        return sorted(self.engine.core.runner.adapters.held)

    async def text(self, model: str) -> str:
        return "".join(delta.text for delta in await self.setup.generate(model=model))

    def gate(self) -> asyncio.Event:
        """Loads reach the engine when it is set."""
        gate, load = asyncio.Event(), self.engine.load_adapter

        async def gated(key: str, folder: Path) -> None:
            await gate.wait()
            await load(key, folder)

        self.engine.load_adapter = gated
        return gate

    def another_model(self, name: str, **adapters: Any) -> LoadedModel:
        """On the same engine; loaded."""
        of = self.setup
        model = LoadedModel((name,), name, self.engine, of.tokenizer, None, of.metrics, {})
        model.adapters = AdapterSet(**adapters)
        model.loaded = True
        return model


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    shop = await Shop(tmp_path).start()
    yield shop
    shop.engine.core.check_integrity()
    assert shop.setup.model.in_flight.calls == 0
    await shop.engine.stop()


async def test_an_adapter_is_a_model_with_a_parent(shop: Shop) -> None:
    await shop.control.load("org/a", "one")
    assert shop.names == ["m", "alias", "org/a"]
    adapter = shop.plane.model("org/a")
    assert (adapter.root, adapter.parent, adapter.info) == ("one", "m", shop.engine.info)
    assert shop.plane.model("alias").parent is None
    assert await shop.plane.chat_prompt("org/a", [{"role": "user", "content": "hi"}], RequestContext())


async def test_its_weights_are_used_and_the_prefix_cache_keeps_them_apart(shop: Shop) -> None:
    await shop.control.load("a", "one")
    await shop.control.load("b", "two")
    texts = [await shop.text(name) for name in ("m", "a", "b") * 2]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


async def test_loaded_again_it_has_other_weights_for_the_cache(shop: Shop) -> None:
    await shop.control.load("a", "one")
    before = await shop.text("a")
    await shop.control.unload("a")
    await shop.control.load("a", "one")
    assert await shop.text("a") != before


async def test_unloading_waits_for_those_who_run_and_for_no_one_else(shop: Shop) -> None:
    await shop.control.load("a", "one")
    expected = await shop.text("a")
    [key] = shop.in_engine
    generation = await shop.plane.generate(request(model="a", max_tokens=8))
    await shop.control.unload("a")
    assert shop.names == ["m", "alias"]
    with pytest.raises(ModelNotFoundError):
        await shop.plane.generate(request(model="a"))
    await shop.text("m")
    assert shop.in_engine == [key]
    async with generation, aclosing(_deltas(generation)) as deltas:
        assert "".join([delta.text async for delta in deltas]) == expected
    while shop.in_engine:
        await asyncio.sleep(0)


async def _deltas(generation: Any) -> AsyncIterator[Any]:
    async for deltas in generation:
        for delta in deltas:
            yield delta


async def test_an_idle_adapter_is_free_when_unloading_returns(shop: Shop) -> None:
    for name in ("one", "two", "three"):
        await shop.control.load(name, name)
    with pytest.raises(OverloadedError):
        await shop.control.load("four", "four")
    await shop.control.unload("two")
    await shop.control.load("four", "four")
    assert shop.names == ["m", "alias", "one", "three", "four"]
    assert len(shop.in_engine) == 3


async def test_a_call_that_is_still_tokenized_keeps_its_adapter(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    await shop.control.load("a", "one")
    encode, gate = shop.setup.tokenizer.encode, threading.Event()

    def slow(text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        gate.wait(30)
        return encode(text, add_special_tokens, limit)

    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode", lambda self, *given, limit=None: slow(*given, limit))
        long = "word " * 2000  # encoded in a thread
        caller = asyncio.create_task(shop.plane.generate(request(model="a", prompts=[long], max_tokens=1)))
        await asyncio.sleep(0)
    await shop.control.unload("a")
    await shop.text("m")
    assert len(shop.in_engine) == 1
    gate.set()
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        await caller
    while shop.in_engine:
        await asyncio.sleep(0)


async def test_in_place_the_old_weights_serve_requests_that_have_begun(shop: Shop) -> None:
    await shop.control.load("a", "one")
    before = await shop.text("a")
    [old] = shop.in_engine
    generation = await shop.plane.generate(request(model="a", max_tokens=8))
    await shop.control.load("a", "two", replace=True)
    assert shop.plane.model("a").root == "two"
    assert await shop.text("a") != before
    async with generation, aclosing(_deltas(generation)) as deltas:
        assert "".join([delta.text async for delta in deltas]) == before
    while old in shop.in_engine:
        await asyncio.sleep(0)
    assert len(shop.in_engine) == 1


async def test_in_place_a_load_that_fails_changes_nothing(shop: Shop) -> None:
    await shop.control.load("a", "one")
    before = await shop.text("a")
    with pytest.raises(NotFoundError):
        await shop.control.load("a", "nowhere", replace=True)
    assert await shop.text("a") == before
    await shop.control.load("new", "two", replace=True)
    assert shop.names[2:] == ["a", "new"]


@pytest.mark.parametrize("replace", [False, True])
async def test_of_two_who_load_one_name_one_wins(shop: Shop, replace: bool) -> None:
    gate = shop.gate()
    both = [asyncio.create_task(shop.control.load("a", name, replace=replace)) for name in ("one", "two")]
    await asyncio.sleep(0)
    with pytest.raises(NotReadyError, match="is being loaded"):
        await shop.control.unload("a")
    assert shop.names == ["m", "alias"]
    gate.set()
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), AlreadyExistsError]
    assert (shop.plane.model("a").root, len(shop.in_engine)) == ("one", 1)


async def test_a_caller_that_leaves_leaves_nothing_half_done(shop: Shop) -> None:
    gate = shop.gate()
    caller = asyncio.create_task(shop.control.load("a", "one"))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gate.set()
    while "a" not in shop.names:
        await asyncio.sleep(0)
    await shop.text("a")
    await shop.control.unload("a")
    assert shop.in_engine == []


async def test_a_failure_that_nobody_waits_for_frees_the_name(shop: Shop) -> None:
    caller = asyncio.create_task(shop.control.load("a", "nowhere"))
    await asyncio.sleep(0)
    caller.cancel()
    while True:
        try:
            await shop.control.load("a", "one")
            break
        except AlreadyExistsError:
            await asyncio.sleep(0.001)
    assert shop.names[2:] == ["a"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": "m"}, AlreadyExistsError),
        ({"name": "alias", "replace": True}, AlreadyExistsError),
        ({"name": "taken"}, AlreadyExistsError),
        ({"name": " "}, InvalidRequestError),
        ({"path": "../model"}, InvalidRequestError),
        ({"path": "nothing"}, NotFoundError),
        ({"base": "nobody"}, ModelNotFoundError),
        ({"base": "taken"}, InvalidRequestError),
    ],
)
async def test_what_cannot_be_loaded(shop: Shop, fields: dict[str, Any], error: type[Exception]) -> None:
    await shop.control.load("taken", "one")
    before = shop.in_engine
    with pytest.raises(error):
        await shop.control.load(**{"name": "a", "path": "two", **fields})
    assert (shop.names, shop.in_engine) == (["m", "alias", "taken"], before)


@pytest.mark.parametrize("name", ["m", "nobody"])
async def test_only_adapters_can_be_unloaded(shop: Shop, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as refused:
        await shop.control.unload(name)
    assert refused.value.param == "lora_name"


async def test_without_a_directory_adapters_stay_as_they_are(shop: Shop) -> None:
    assert shop.control.allowed
    shop.setup.take_adapters(AdapterSet([new_adapter("fixed", shop.folder / "one")]))
    assert not shop.control.allowed
    for change in (shop.control.load("a", "one", base="m"), shop.control.unload("fixed")):
        with pytest.raises(UnsupportedError, match="no lora-directory"):
            await change
    assert shop.names == ["m", "alias", "fixed"]


async def test_an_engine_s_refusal_names_no_path(shop: Shop) -> None:
    async def refuse(key: str, folder: Path) -> None:
        raise InvalidRequestError(f"{folder}/adapter_model.safetensors: rank 64 is above 16")

    shop.engine.load_adapter = refuse
    with pytest.raises(InvalidRequestError) as refused:
        await shop.control.load("a", "one")
    assert refused.value.message == "one/adapter_model.safetensors: rank 64 is above 16"
    assert shop.names == ["m", "alias"]


async def test_an_engine_that_died_has_freed_everything(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async def dead(key: str) -> None:
        raise EngineDeadError("dead")

    await shop.control.load("a", "one")
    shop.engine.unload_adapter = dead
    await shop.control.unload("a")
    assert shop.names == ["m", "alias"]
    assert "could not be freed" not in caplog.text


async def test_a_loading_model_takes_no_adapters(shop: Shop) -> None:
    shop.setup.model.loaded = False
    with pytest.raises(NotReadyError):
        await shop.control.load("a", "one")


async def test_with_several_models_the_base_is_named(shop: Shop) -> None:
    other = shop.another_model("other", directory=shop.folder, max_loaded=1)
    shop.plane.models.add(other)
    with pytest.raises(InvalidRequestError, match="base_model_name is missing"):
        await shop.control.load("a", "one")
    await shop.control.load("a", "one", base="other")
    await shop.control.load("b", "two", base="alias")
    assert [(model.name, model.parent) for model in shop.plane.models.served()][3:] == [("b", "m"), ("a", "other")]
    with pytest.raises(AlreadyExistsError):
        await shop.control.load("a", "one", base="m", replace=True)
    shop.plane.models.remove(other)
    assert shop.names == ["m", "alias", "b"]
    await shop.control.load("a", "one")


async def test_names_of_models_and_adapters_do_not_collide(shop: Shop) -> None:
    await shop.control.load("a", "one")
    clashes = [
        shop.another_model("a"),
        shop.another_model("new", loaded=[new_adapter("a", shop.folder)]),
        shop.another_model("new", loaded=[new_adapter("m", shop.folder)]),
    ]
    for model in clashes:
        with pytest.raises(AlreadyExistsError):
            shop.plane.models.add(model)
    assert shop.names == ["m", "alias", "a"]
    assert shop.plane.models.holder("a") == (shop.setup.model, shop.setup.model.adapters.get("a"))


async def test_a_newer_version_of_a_model_takes_over_names_and_adapters(shop: Shop) -> None:
    await shop.control.load("a", "one")
    newer = shop.another_model("m", loaded=[new_adapter("a", shop.folder / "two")])
    shop.plane.models.add(newer)
    shop.plane.models.remove(shop.setup.model)
    assert [(model.name, model.root) for model in shop.plane.models.served()] == [("m", "m"), ("a", "two")]


async def test_a_model_that_goes_while_an_adapter_comes(shop: Shop) -> None:
    gate = shop.gate()
    caller = asyncio.create_task(shop.control.load("a", "one"))
    await asyncio.sleep(0)
    shop.plane.models.remove(shop.setup.model)
    await asyncio.sleep(0)
    idle = asyncio.create_task(shop.setup.model.in_flight.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()  # its engine is not stopped under the load
    gate.set()
    with pytest.raises(ModelNotFoundError, match="unloaded meanwhile"):
        await caller
    await idle
    assert shop.in_engine == []


async def test_a_model_that_comes_with_the_name_while_an_adapter_loads(shop: Shop) -> None:
    gate = shop.gate()
    caller = asyncio.create_task(shop.control.load("a", "one"))
    await asyncio.sleep(0)
    shop.plane.models.add(shop.another_model("a"))
    gate.set()
    with pytest.raises(AlreadyExistsError):
        await caller
    assert shop.in_engine == []
    assert shop.plane.model("a").parent is None


async def test_metrics_tell_what_is_loaded_and_used(shop: Shop) -> None:
    assert not [family for family in shop.setup.metrics.collect() if "lora" in family.name]
    metrics = ModelMetrics("m", lambda: shop.engine.stats, lambda: True, shop.setup.model.adapters)
    await shop.control.load("a", "one")
    async with await shop.plane.generate(request(model="a", max_tokens=8)):
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in metrics.collect()
            for sample in family.samples
            if "lora" in sample.name
        }
    assert found == {
        ("penstock_lora_adapters", "m"): 1,
        ("penstock_lora_adapters_max", "m"): MAX_LORAS,
        ("penstock_lora_requests", "m", "a"): 1,
    }


async def test_a_client_that_disconnects_while_it_loads(shop: Shop) -> None:
    gate = shop.gate()
    app = build_app(shop.plane, AppSettings())
    leaving = AsgiCall(app, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "one"})
    loading = asyncio.create_task(leaving.run())
    await asyncio.sleep(0)
    leaving.disconnect()
    await loading
    assert leaving.messages == []
    again = await call(app, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "one"})
    assert again.status == 409
    gate.set()
    while "a" not in shop.names:
        await asyncio.sleep(0)
    assert (await call(app, "/v1/unload_lora_adapter", {"lora_name": "a"})).status == 200
    assert shop.in_engine == []
