"""Public names of language models in one process: prompts for the target that answers, shadows that are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, NotReadyError, PermissionDeniedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.traffic_rules import ShadowRule, TrafficRule, WeightedTarget
from penstock.gateway.models.language.dataplane import Generation
from penstock.gateway.models.traffic.service import TrafficService
from penstock.gateway.models.traffic.table import PublicName
from penstock.gateway.requests.context import Principal, RequestContext
from support.dataplane import Setup, request
from support.kserve import FakeModelStore, add_sub

A = WeightedTarget("a")


class Server:
    """Models `a` and `same`, which write the same, and `other`, which does not."""

    def __init__(self, folder: Path) -> None:
        self.setups = {
            name: Setup(folder / name, SchedulerConfig(), 64, answer=answer)
            for name, answer in (("a", "one two"), ("same", "one two"), ("other", "three"))
        }
        self.plane = self.setups["a"].plane
        self.plane.models.remove(self.setups["a"].model)
        for name, setup in self.setups.items():
            setup.model.names = (name,)
            setup.model.loaded = True
            self.plane.models.add(setup.model)
        self.traffic = TrafficService((), FakeModelStore(add_sub()), self.plane)

    def put(self, *targets: WeightedTarget, **fields: Any) -> PublicName:
        self.traffic.table.put(TrafficRule("public", targets, **fields))
        return self.traffic.table.names["public"]

    async def chat(self, context: RequestContext, **params: Any) -> Generation:
        prompt = await self.plane.chat_prompt("public", [{"role": "user", "content": "hi"}], context)
        wanted = request(params=params, model="public", prompts=[prompt.token_ids], context=context)
        return await self.plane.generate(wanted)

    async def ask(self, **params: Any) -> str:
        """The target that has answered, to the end."""
        context = RequestContext()
        async with await self.chat(context, **params) as generation:
            async for _ in generation:
                pass
        return context.record.target


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    for name in ("a", "same", "other"):
        (tmp_path / name).mkdir()
    made = Server(tmp_path)
    for setup in made.setups.values():
        await setup.engine.start()
    yield made
    for setup in made.setups.values():
        setup.engine.core.check_integrity()
        await setup.engine.stop()


async def shadowed(public: PublicName) -> dict[str, int]:
    assert public.shadows is not None
    async with asyncio.timeout(20):
        while public.shadows.in_flight:
            await asyncio.sleep(0.001)
    return {result.value: count for result, count in public.shadows.results.items()}


async def test_a_request_has_one_target_from_its_prompt_to_its_end(server: Server) -> None:
    public = server.put(A, WeightedTarget("other"))
    context = RequestContext()
    first = server.plane.model("public", context)
    assert first.name == "public"
    target = context.record.target
    server.traffic.table.remove("public")
    async with await server.chat(context) as generation:
        tokens = [delta async for deltas in generation for delta in deltas]
    assert (context.record.model, context.record.target) == ("public", target)
    text = "".join(delta.text for delta in tokens)
    assert text == {"a": "one two", "other": "three"}[target]
    assert public.route.counts[target].ended == {"ok": 1}


async def test_shadows_of_texts(server: Server) -> None:
    public = server.put(A, shadow=ShadowRule("same"))
    await server.ask()
    assert await shadowed(public) == {"equal": 1}
    public = server.put(A, shadow=ShadowRule("other"))
    await server.ask()
    assert await shadowed(public) == {"different": 1}
    await server.ask(temperature=1.0)
    assert await shadowed(public) == {"different": 1, "uncompared": 1}
    public = server.put(A, shadow=ShadowRule("nobody"))
    await server.ask()
    assert await shadowed(public) == {"failed": 1}
    assert public.route.counts["a"].ended == {"ok": 4}


async def test_a_client_that_leaves_and_a_request_that_is_wrong_end_once(server: Server) -> None:
    public = server.put(A)
    generation = await server.chat(RequestContext())
    generation.close()
    generation.close()
    with pytest.raises(InvalidRequestError):
        await server.ask(max_tokens=10_000)
    counts = public.route.counts["a"]
    assert counts.ended == {"cancelled": 1, "client_error": 1}
    assert (counts.accepted, counts.in_flight) == (2, 0)


async def test_keys_lists_and_models_of_another_kind(server: Server) -> None:
    server.put(A)
    assert [model.name for model in server.plane.models.served()] == ["a", "same", "other", "public"]
    stranger = RequestContext(principal=Principal(models=("a",)))
    with pytest.raises(PermissionDeniedError):
        server.plane.model("public", stranger)
    assert stranger.record.target == ""
    guest = RequestContext(principal=Principal(models=("public",)))
    async with await server.chat(guest) as generation:
        assert [deltas async for deltas in generation]
    server.put(WeightedTarget("add_sub"), A)
    with pytest.raises(InvalidRequestError, match="The model `add_sub` generates no text"):
        server.plane.model("public", RequestContext())
    server.put(A)
    server.setups["a"].model.loaded = False
    with pytest.raises(NotReadyError, match="no target to answer"):
        server.plane.model("public", RequestContext())
    assert [model.name for model in server.plane.models.served()] == ["same", "other"]
    server.traffic.table.remove("public")
    with pytest.raises(ModelNotFoundError):
        server.plane.model("public", RequestContext())


async def test_what_a_request_hands_over_and_what_it_does_not(server: Server) -> None:
    """A response in the background goes on with the prompt of its target; the next request on a stream has its own."""
    server.put(A, WeightedTarget("other"))
    context = RequestContext()
    server.plane.model("public", context)
    own = context.next_request()
    assert own.routed is None
    context.hand_over_to(own)
    assert own.routed is context.routed
    wanted = replace(request(model="public"), context=own)
    async with await server.plane.generate(wanted) as generation:
        assert [deltas async for deltas in generation]
    assert (own.record.model, own.record.target) == ("public", context.record.target)
