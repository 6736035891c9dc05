"""Prompts that one replica computes and another one goes on with: every answer is what it would have been."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flow.test_replicas import CONFIG, FIRST, Reader, expected, quick, request
from penstock.engines.contract.messages import AddRequest, PoolingParams, SamplingParams
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.handover.memory import HandoverMemory
from penstock.engines.handover.settings import Region
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.replicas.engine import ReplicatedEngine
from penstock.engines.replicas.state import ReplicaSettings, RoutingPolicy
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import KVGroup, StateGroup
from support.replicas import MortalEngine
from support.simulated import generate

__all__ = ["quick"]
PROMPT = list(range(50))
BLOCKS = len(PROMPT) // CONFIG.block_size
SLOT = 4 * 8 + 64


class Fleet:
    """Some prefill replicas, then others that decode."""

    def __init__(
        self, num_prefill: int = 1, num_decode: int = 1, num_bytes: int = 1 << 20, config: SimulatedConfig = CONFIG
    ) -> None:
        self.memory = HandoverMemory(num_prefill, num_bytes)
        roles = [*range(num_prefill), *[None] * num_decode]
        made = [MortalEngine(lambda: SimulatedRunner(config), handover=self.memory.config(own)) for own in roles]
        self.prefill, self.decode = made[:num_prefill], made[num_prefill:]
        self.all = made
        rules = ReplicaSettings(num_prefill=num_prefill, handover_min_tokens=8, policy=RoutingPolicy.PREFIX)
        self.engine = ReplicatedEngine(made, rules, memory=self.memory)

    async def ask(self, prompt: list[int], *args: int, **params: object) -> list[list[int]]:
        reader = Reader(self.engine.submit([request(self.engine, prompt, *args, **params)]))
        await reader.done()
        assert not reader.errors
        return list(reader.tokens.values())

    @property
    def computed(self) -> list[int]:
        """Prompt tokens, recomputed ones included, by replica."""
        return [replica.stats.prompt_tokens for replica in self.all]


MakeFleet = Callable[..., Awaitable[Fleet]]


@pytest.fixture
async def make() -> AsyncIterator[MakeFleet]:
    fleets: list[Fleet] = []

    async def make_one(*args: int, **settings: object) -> Fleet:
        fleets.append(Fleet(*args, **settings))  # type: ignore[arg-type]
        await fleets[-1].engine.start()
        return fleets[-1]

    yield make_one
    for fleet in fleets:
        await fleet.engine.stop()


@pytest.mark.parametrize("groups", [(KVGroup(4),), (KVGroup(4), KVGroup(4, 6))], ids=["one group", "a window"])
async def test_the_other_replica_computes_only_what_no_full_block_has(
    make: MakeFleet, groups: tuple[KVGroup, ...]
) -> None:
    config = SimulatedConfig(vocab_size=1008, first_token_id=FIRST, kv_groups=groups, num_blocks=256, max_model_len=400)
    fleet = await make(config=config)
    info = SimulatedRunner(config).info
    assert await fleet.ask(PROMPT) == [generate(info, PROMPT, 30, first_token_id=FIRST)]
    assert fleet.computed == [len(PROMPT), len(PROMPT) % 4]
    prefill, decode = fleet.prefill[0].stats, fleet.decode[0].stats
    assert (prefill.generation_tokens, decode.generation_tokens) == (1, 29)
    assert prefill.handover.saved == BLOCKS * len(groups)
    assert prefill.handover.bytes > 0
    assert 0 < decode.handover.loaded <= prefill.handover.saved
    assert (decode.handover.lost, decode.handover.missed_tokens, decode.handover.saved) == (0, 0, 0)
    assert fleet.engine.moves.handed_over == 1
    assert [state.role for state in fleet.engine.replica_states()] == ["prefill", "decode"]


async def test_states_are_handed_over(make: MakeFleet) -> None:
    """The other replica goes on from the last checkpoint, a row of states with it."""
    config = msgspec.structs.replace(CONFIG, states=StateGroup(8, 64, 4))
    fleet = await make(config=config)
    info = SimulatedRunner(config).info
    assert await fleet.ask(PROMPT) == [generate(info, PROMPT, 30, first_token_id=config.first_token_id)]
    assert fleet.computed == [len(PROMPT), len(PROMPT) % 8]
    assert fleet.prefill[0].stats.handover.saved == BLOCKS + len(PROMPT) // 8
    assert fleet.decode[0].stats.handover.loaded == len(PROMPT) // 8 * 2 + 1
    assert fleet.decode[0].stats.handover.missed_tokens == 0


async def test_samples_that_draw_go_on_with_their_own_numbers(make: MakeFleet) -> None:
    fleet = await make(1, 2)
    answers = await fleet.ask(PROMPT, 30, 3, temperature=1.0, seed=5)
    assert answers == [expected(PROMPT, seed=5 + index) for index in range(3)]
    assert fleet.engine.moves.handed_over == 3
    assert await fleet.ask(PROMPT, 30, 1, temperature=1.0) != [expected(PROMPT)]


async def test_who_gets_what(make: MakeFleet) -> None:
    fleet = await make()
    assert await fleet.ask([1, 2, 3]) == [expected([1, 2, 3])]
    assert not fleet.prefill[0].received, "short prompts are not worth it"
    assert await fleet.ask(PROMPT, 1) == [expected(PROMPT, 1)]
    assert fleet.engine.moves.handed_over == 0, "there is nothing to go on with"
    vector = AddRequest(fleet.engine.new_ids(1), PROMPT, PoolingParams(), arrival_time=0.0)
    await Reader(fleet.engine.submit([vector])).done()
    assert len(fleet.prefill[0].received) == 2
    await fleet.ask(PROMPT)
    longer = [*PROMPT, 7, 8, 9]
    assert await fleet.ask(longer) == [expected(longer)]
    assert len(fleet.prefill[0].received) == 3, "the decode replica has all but a few of its tokens"


async def test_prompt_tokens_are_told_once_and_as_they_were_computed(make: MakeFleet) -> None:
    fleet = await make()
    await fleet.ask(PROMPT[:32])
    await fleet.decode[0].die()
    await fleet.decode[0].start()
    reader = Reader(fleet.engine.submit([request(fleet.engine, PROMPT)]))
    await reader.done()
    assert reader.prompts == 1
    assert fleet.computed[0] == len(PROMPT), "its first half is in the prefill replica's own cache"


async def test_what_is_overwritten_is_computed_again(make: MakeFleet) -> None:
    """Memory for ten blocks, of prompts with twelve."""
    fleet = await make(num_bytes=10 * (SLOT + 8))
    others = [[k, *PROMPT[1:]] for k in range(5)]
    answers = await asyncio.gather(*(fleet.ask(prompt) for prompt in others))
    assert answers == [[expected(prompt)] for prompt in others]
    assert fleet.prefill[0].stats.handover.bytes <= 10 * (SLOT + 8)
    assert fleet.decode[0].stats.handover.missed_tokens > 0
    sizes = [os.fstat(descriptor).st_size for descriptor in fleet.memory._descriptors]
    assert sum(sizes) <= 10 * (SLOT + 8)


async def test_what_a_prefill_replica_has_cached_is_written_again(make: MakeFleet) -> None:
    fleet = await make()
    await fleet.ask(PROMPT)
    fleet.memory.clear()
    await fleet.decode[0].die()
    await fleet.decode[0].start()
    await asyncio.sleep(0.01)
    assert await fleet.ask(PROMPT) == [expected(PROMPT)]
    assert fleet.computed == [len(PROMPT) + len(PROMPT) % 4, len(PROMPT) % 4]


async def test_what_is_damaged_is_computed_again(make: MakeFleet) -> None:
    fleet = await make()
    descriptor = fleet.memory._descriptors[0]
    reader = Reader(fleet.engine.submit([request(fleet.engine, PROMPT)]))
    while not fleet.prefill[0].stats.handover.saved:
        await asyncio.sleep(0)
    size = os.fstat(descriptor).st_size
    os.pwrite(descriptor, b"\xff" * size, 0)
    await reader.done()
    assert reader.only == expected(PROMPT)
    stats = fleet.decode[0].stats
    assert (stats.handover.lost, stats.handover.loaded) == (BLOCKS, 0)
    assert stats.handover.missed_tokens == BLOCKS * 4


async def test_a_reset_empties_the_shared_memory(make: MakeFleet) -> None:
    fleet = await make()
    await fleet.ask(PROMPT)
    await fleet.engine.reset_prefix_cache()
    assert [os.fstat(descriptor).st_size for descriptor in fleet.memory._descriptors] == [0, 0]
    assert await fleet.ask(PROMPT) == [expected(PROMPT)]
    assert fleet.computed == [2 * len(PROMPT), 4]


async def test_a_stop_gives_the_memory_back(make: MakeFleet) -> None:
    """A model that sleeps starts again later."""
    fleet = await make()
    for _ in range(2):
        assert await fleet.ask(PROMPT) == [expected(PROMPT)]
        assert fleet.decode[0].stats.handover.loaded == BLOCKS
        await fleet.engine.stop()
        assert [os.fstat(descriptor).st_size for descriptor in fleet.memory._descriptors] == [0, 0]
        await fleet.engine.start()


async def test_adapters_have_blocks_of_their_own(make: MakeFleet, tmp_path: Path) -> None:
    fleet = await make()
    (tmp_path / "adapter_config.json").write_text("{}")
    await fleet.engine.load_adapter("one", tmp_path)
    params = SamplingParams(max_tokens=5, temperature=0.0)
    plain = await fleet.ask(PROMPT, 5)
    message = AddRequest(fleet.engine.new_ids(1), PROMPT, params, arrival_time=0.0, adapter="one")
    reader = await Reader(fleet.engine.submit([message])).done()
    assert [reader.only] != plain
    assert fleet.computed == [2 * len(PROMPT), 2 * (len(PROMPT) % 4)]


async def test_a_prefill_replica_that_dies_costs_nothing(make: MakeFleet) -> None:
    fleet = await make()
    slow = Reader(fleet.engine.submit([request(fleet.engine, PROMPT)]))
    await fleet.prefill[0].die()
    await slow.done()
    assert slow.only == expected(PROMPT), "the decode replica computed all of it"
    assert await fleet.ask([5, *PROMPT]) == [expected([5, *PROMPT])], "and goes on to do so"
    await fleet.prefill[0].start()
    await asyncio.sleep(0.01)
    handed = fleet.engine.moves.handed_over
    assert await fleet.ask([6, *PROMPT]) == [expected([6, *PROMPT])]
    assert fleet.engine.moves.handed_over == handed + 1


async def test_a_prefill_replica_that_was_restarted_finds_what_it_wrote(make: MakeFleet) -> None:
    fleet = await make()
    await fleet.ask(PROMPT)
    for replica in fleet.all:
        await replica.die()
        await replica.start()
    await asyncio.sleep(0.01)
    assert await fleet.ask(PROMPT) == [expected(PROMPT)]
    assert fleet.prefill[0].stats.handover.loaded == BLOCKS
    assert fleet.computed == [2, 2]


async def test_without_decode_replicas_the_others_do_it_all(make: MakeFleet) -> None:
    fleet = await make()
    reader = Reader(fleet.engine.submit([request(fleet.engine, PROMPT)]))
    await reader.until(5)
    await fleet.decode[0].die()
    await reader.done()
    assert reader.only == expected(PROMPT)
    assert await fleet.ask([1, 2]) == [expected([1, 2])]
    assert await fleet.ask([3, *PROMPT]) == [expected([3, *PROMPT])]
    assert fleet.engine.moves.resumed == 1
    assert fleet.engine.moves.handed_over == 1


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), num_prefill=st.integers(1, 2), num_decode=st.integers(1, 2))
def test_whatever_dies_and_is_overwritten(seed: int, num_prefill: int, num_decode: int) -> None:
    asyncio.run(_storm(random.Random(seed), num_prefill, num_decode))


async def _storm(chance: random.Random, num_prefill: int, num_decode: int) -> None:
    fleet = Fleet(num_prefill, num_decode, num_bytes=chance.choice([20, 60, 1000]) * SLOT * num_prefill)
    await fleet.engine.start()
    asked: list[tuple[Reader, AddRequest]] = []
    for k in range(12):
        prompt = [k % 3, *range(chance.randint(1, 60))]
        params = chance.choice([{"temperature": 0.0}, {"temperature": 1.0, "seed": k}])
        message = request(fleet.engine, prompt, chance.randint(1, 30), chance.choice([1, 1, 3]), **params)
        if fleet.engine.ready:
            asked.append((Reader(fleet.engine.submit([message])), message))
        for _ in range(chance.randint(0, 12)):
            await asyncio.sleep(0)
        victim = chance.choice(fleet.all)
        if not victim.ready:
            await victim.start()
        elif chance.random() < 0.2:
            await victim.die()
    for replica in fleet.all:
        if not replica.ready:
            await replica.start()
    for reader, message in asked:
        await reader.done()
        params, prompt = message.params, message.prompt_token_ids
        assert isinstance(params, SamplingParams)
        for index, request_id in enumerate(message.ids):
            seed = None if params.seed is None else params.seed + index
            [end], tokens = reader.ends[request_id], reader.tokens[request_id]
            assert tokens == expected(prompt, params.max_tokens, seed)[: len(tokens) if end.error else None]
            assert end.error is None or fleet.engine.moves.given_up, "unless too many died with it in a row"
    assert fleet.engine.stats.num_running == fleet.engine.stats.num_waiting == 0
    await fleet.engine.stop()


def test_what_an_engine_cannot_do() -> None:
    memory = HandoverMemory(1, 5)
    small = EngineSpec(runner="simulated", scheduler=SchedulerConfig(handover=memory.config(0)))
    with pytest.raises(EngineError, match="handover-bytes: one block"):
        load_core(small, lambda: 0.0)
    own = EngineSpec(runner="simulated", scheduling="engine", scheduler=small.scheduler)
    with pytest.raises(UnsupportedError, match="prefill-replicas: simulated has a KV cache of its own"):
        load_core(own, lambda: 0.0)
    with pytest.raises(ValueError, match="prefill-replicas"):
        SchedulerConfig(handover=memory.config(0), enable_prefix_caching=False)
    with pytest.raises(ValueError, match="prefill-replicas"):
        SchedulerConfig(handover=memory.config(0), kv_offload_dir="x")
    gone = msgspec.structs.replace(HandoverMemory(1, 1 << 20).config(0), regions=(Region("/proc/self/fd/x", "y"),))
    with pytest.raises(EngineError, match="shared memory cannot be opened"):
        load_core(EngineSpec(runner="simulated", scheduler=SchedulerConfig(handover=gone)), lambda: 0.0)
