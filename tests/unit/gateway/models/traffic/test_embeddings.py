"""Public names of embedding models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import EngineError, InvalidRequestError, NotReadyError
from penstock.gateway.configuration.traffic_rules import ShadowRule, TrafficRule, WeightedTarget
from penstock.gateway.models.entries import Kind, Upstream
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.traffic.routing import TrafficRouting
from penstock.gateway.models.traffic.store import TrafficStore
from penstock.gateway.models.traffic.table import TrafficTable
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from support.kserve import FakeModelStore
from support.pooling import FakeSource, Setup, served

FIRST, SECOND = WeightedTarget("embedder"), WeightedTarget("second")


class Server(Setup):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.second = FakeSource()
        self.models = self.plane.models
        self.models.add(served(self.tokenizer, "second", self.second))
        self.table = TrafficTable()
        tensors = TrafficStore(FakeModelStore(), self.table, lambda name: False)
        self.models.traffic = TrafficRouting(self.table, self.dataplane, tensors)

    async def ask(self, context: RequestContext) -> PoolingModel:
        model = self.plane.model("public", context)
        await self.plane.rows(model, lambda: [TokenizedText((1, 2))], 0, context)
        return model


async def test_requests_are_divided_and_end_once(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.table.put(TrafficRule("public", (FIRST, SECOND), shadow=ShadowRule("late")))
    contexts = [RequestContext() for _ in range(60)]
    models = [await server.ask(context) for context in contexts]
    assert {model.names[0] for model in models} == {"embedder", "second"}
    assert [context.record.target for context in contexts] == [model.names[0] for model in models]
    assert all(server.plane.model("public", each) is model for each, model in zip(contexts, models, strict=True))
    server.embedder.meets = server.second.meets = EngineError("broken")
    with pytest.raises(EngineError):
        await server.ask(RequestContext())
    public = server.table.names["public"]
    counts = public.route.counts.values()
    assert sum(each.ended["ok"] for each in counts) == 60
    assert sum(each.ended["server_error"] for each in counts) == 1
    assert not any(each.in_flight for each in counts)
    assert public.shadows is not None
    assert public.shadows.results == {"skipped": 61}
    first = dict(server.models.listed())["public"]
    assert isinstance(first, PoolingModel)
    assert first.names == ("embedder",)


async def test_targets_that_cannot_be_asked(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.table.put(TrafficRule("public", (WeightedTarget("late"), SECOND)))
    assert {(await server.ask(RequestContext())).names[0] for _ in range(10)} == {"second"}
    server.second.ready = False
    with pytest.raises(NotReadyError, match="no target to answer"):
        await server.ask(RequestContext())
    assert "public" not in dict(server.models.listed())
    server.table.put(TrafficRule("public", (WeightedTarget("tiny"),)))
    with pytest.raises(InvalidRequestError):
        server.plane.model("public", RequestContext())


class Far:
    """A model of another server, which answers at once."""

    name, apis, created, root, owner, folder = "far", ("embeddings",), 0, "far", "upstream", ""
    refusal, gives_way = "far away", False

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        return None


async def test_vectors_of_this_server_and_of_others(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.models.add(cast("Upstream", Far()))
    server.table.put(TrafficRule("public", (FIRST, WeightedTarget("far"))))
    for _ in range(40):
        context = RequestContext()
        entry = await server.models.find("public", Kind.EMBEDDINGS, context)
        if entry.upstream is None:
            assert (await server.ask(context)).names == ("embedder",)
        else:
            exchange = SimpleNamespace(context=context)
            assert await entry.upstream.answer(exchange, "embeddings", b"") is None  # type: ignore[arg-type]
    counts = server.table.names["public"].route.counts
    assert set(counts) == {"embedder", "far"}
    assert all(each.ended["ok"] and not each.in_flight for each in counts.values())
    assert sum(each.accepted for each in counts.values()) == 40
    assert (await server.ask(RequestContext())).names == ("embedder",), "what other servers cannot be asked stays here"
