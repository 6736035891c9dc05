"""Requests over replicas that die, come back and refuse: every stream is what it would have been."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.client.base import StreamTable
from penstock.engines.client.engine import Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import EngineDeadError, EngineError, NotReadyError, QueueFullError
from penstock.engines.replicas import dispatcher, engine
from penstock.engines.replicas.engine import ReplicatedEngine
from penstock.engines.replicas.replica import Replica
from penstock.engines.replicas.state import ReplicaSettings, RoutingPolicy
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from support.replicas import MortalEngine
from support.simulated import generate

FIRST, VOCAB = 1000, 1008
CONFIG = SimulatedConfig(
    vocab_size=VOCAB, first_token_id=FIRST, block_size=4, num_blocks=512, max_model_len=400, max_loras=2
)
GREEDY = {"temperature": 0.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at replicas, and asks them again, at once."""
    monkeypatch.setattr(dispatcher, "_BETWEEN_TRIES", 0.0)
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(engine, "_LOOK_SECONDS_WHEN_WAITING", 0.001)


def mortal(**scheduler: object) -> MortalEngine:
    return MortalEngine(lambda: SimulatedRunner(CONFIG), **scheduler)


Fleet = tuple[ReplicatedEngine, list[MortalEngine]]
MakeFleet = Callable[..., Awaitable[Fleet]]


async def started(number: int, scheduler: dict[str, object] | None = None, **settings: object) -> Fleet:
    replicas = [mortal(**(scheduler or {})) for _ in range(number)]
    fleet = ReplicatedEngine(replicas, ReplicaSettings(**settings))  # type: ignore[arg-type]
    await fleet.start()
    return fleet, replicas


@pytest.fixture
async def make() -> AsyncIterator[MakeFleet]:
    fleets: list[ReplicatedEngine] = []

    async def make_one(*args: object, **settings: object) -> Fleet:
        made = await started(*args, **settings)  # type: ignore[arg-type]
        fleets.append(made[0])
        return made

    yield make_one
    for fleet in fleets:
        await fleet.stop()


def request(fleet: Engine, prompt: list[int], count: int = 30, n: int = 1, **params: object) -> AddRequest:
    sampling = SamplingParams(max_tokens=count, **{**GREEDY, **params})  # type: ignore[arg-type]
    return AddRequest(fleet.new_ids(n), prompt, sampling, arrival_time=0.0)


def expected(prompt: list[int], count: int = 30, seed: int | None = None) -> list[int]:
    params = None if seed is None else SamplingParams(max_tokens=count, temperature=1.0)
    info = SimulatedRunner(CONFIG).info
    return generate(info, prompt, count, first_token_id=FIRST, params=params, seed=seed or 0)


class Reader:
    """Everything that a stream brings."""

    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self.tokens: dict[int, list[int]] = {i: [] for i in stream.live_ids}
        self.ends: dict[int, list[RequestOutput]] = {i: [] for i in stream.live_ids}
        self.prompts = 0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for outputs in self.stream:
            for output in outputs:
                self.tokens[output.id] += output.token_ids
                self.prompts += output.prompt is not None
                if output.finish_reason is not None:
                    self.ends[output.id].append(output)

    async def until(self, count: int) -> None:
        """Some sample has so many tokens."""
        async with asyncio.timeout(30):
            while max(map(len, self.tokens.values())) < count:
                await asyncio.sleep(0)

    async def done(self) -> Reader:
        async with asyncio.timeout(60):
            await self.task
        assert all(len(ends) == 1 for ends in self.ends.values()), "each has exactly one end"
        return self

    @property
    def only(self) -> list[int]:
        [tokens] = self.tokens.values()
        return tokens

    @property
    def errors(self) -> list[str]:
        return [end.error.code for [end] in self.ends.values() if end.error is not None]


def busy(replicas: list[MortalEngine]) -> MortalEngine:
    return max(replicas, key=lambda replica: len(replica.received))


async def test_each_replica_shows_itself_unless_it_is_down(make: MakeFleet) -> None:
    fleet, replicas = await make(2, {"max_num_seqs": 1})
    streams = [fleet.submit([request(fleet, [number])]) for number in range(4)]
    await fleet.inspect()  # what comes with it waits for the next step
    views = await fleet.inspect()
    assert [sum(row.waits_for == "seat" for row in view.requests) for view in views if view] == [1, 1]
    await replicas[0].die()
    assert [view is None for view in await fleet.inspect([10**6, 0])] == [True, False]
    for stream in streams:
        stream.close()


async def test_a_stream_goes_on_behind_its_tokens(make: MakeFleet) -> None:
    fleet, replicas = await make(2)
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3, 4, 5])]))
    await reader.until(7)
    await busy(replicas).die()
    await reader.done()
    assert reader.only == expected([1, 2, 3, 4, 5])
    assert reader.prompts == 1
    assert fleet.moves.resumed == 1
    assert [end.finish_reason for [end] in reader.ends.values()] == [FinishReason.LENGTH]


@pytest.mark.parametrize("seed", [None, 77])
async def test_random_tokens_go_on_as_they_would_have(make: MakeFleet, seed: int | None) -> None:
    """Samples that draw, each with its own seed, also where the client has named none."""
    fleet, replicas = await make(2)
    message = request(fleet, [1, 2, 3, 4, 5], n=3, temperature=1.0, seed=seed)
    reader = Reader(fleet.submit([message]))
    await reader.until(5)
    first = busy(replicas)
    params = first.received[0].params
    assert isinstance(params, SamplingParams)
    assert params.seed is not None
    await first.die()
    await reader.done()
    for index, request_id in enumerate(message.ids):
        assert reader.tokens[request_id] == expected([1, 2, 3, 4, 5], seed=params.seed + index)


async def test_samples_of_a_request_stay_together(make: MakeFleet) -> None:
    fleet, replicas = await make(3)
    readers = [Reader(fleet.submit([request(fleet, [k, 2, 3], n=4)])) for k in range(6)]
    for reader in readers:
        await reader.done()
    assert sorted(len(each.ids) for replica in replicas for each in replica.received) == [4] * 6
    assert all(len(replica.received) == 2 for replica in replicas)


async def test_what_has_not_begun_goes_elsewhere_whole(make: MakeFleet) -> None:
    fleet, replicas = await make(2, resume=False)
    message = request(fleet, [1, 2, 3], n=2)
    reader = Reader(fleet.submit([message]))
    await busy(replicas).die()
    await reader.done()
    assert list(reader.tokens.values()) == [expected([1, 2, 3])] * 2
    assert fleet.moves.failed_over == 2
    assert sum(len(replica.received) for replica in replicas) == 2


async def test_without_resume_a_stream_ends_with_its_replica(make: MakeFleet) -> None:
    fleet, replicas = await make(2, resume=False)
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    await reader.until(3)
    await busy(replicas).die()
    await reader.done()
    assert reader.errors == ["engine_dead"]
    assert reader.only == expected([1, 2, 3])[: len(reader.only)]


async def test_a_single_replica_goes_on_once_it_is_back(make: MakeFleet) -> None:
    fleet, [replica] = await make(1)
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    await reader.until(3)
    await replica.die()
    with pytest.raises(NotReadyError):
        fleet.submit([request(fleet, [4])])
    await asyncio.sleep(0.01)
    await replica.start()
    await reader.done()
    assert reader.only == expected([1, 2, 3])


async def test_nothing_waits_for_a_replica_longer_than_it_may(make: MakeFleet) -> None:
    fleet, [replica] = await make(1, resume_wait=0.02)
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    await reader.until(3)
    await replica.die()
    await reader.done()
    assert reader.errors == ["engine_dead"]


class Mute(MortalEngine):
    """Takes requests in and says nothing until it dies."""

    def __init__(self) -> None:
        super().__init__(lambda: SimulatedRunner(CONFIG))
        self._held = StreamTable(lambda _: None)

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        self.received += requests
        return self._held.submit(requests)

    def says(self, tokens: list[int]) -> None:
        """Nobody has looked at it when the engine dies."""
        self._held.deliver([RequestOutput(self.received[0].ids[0], tokens)])

    async def die(self) -> None:
        await super().die()
        self._held.fail_all(EngineDeadError("The engine died while it worked on this request."))
        self._held.call_listeners()


async def test_a_request_that_kills_replicas_is_given_up() -> None:
    replicas = [Mute() for _ in range(5)]
    fleet = ReplicatedEngine(replicas)
    await fleet.start()
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    deaths = 0
    while not reader.task.done():
        for replica in replicas:
            if replica.received and replica.ready:
                deaths += 1
                await replica.die()
        await asyncio.sleep(0)
    assert (await reader.done()).errors == ["engine_dead"]
    assert deaths == 3
    await fleet.stop()


async def test_what_came_right_before_the_death_reaches_the_client() -> None:
    replica = Mute()
    fleet = ReplicatedEngine([replica], ReplicaSettings(resume=False))
    await fleet.start()
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    replica.says([1001, 1002])
    await replica.die()
    assert (await reader.done()).errors == ["engine_dead"]
    assert reader.only == [1001, 1002]
    await fleet.stop()


async def test_a_full_queue_is_passed_on(make: MakeFleet) -> None:
    scheduler = {"max_num_seqs": 1, "max_queued_requests": 1}
    fleet, _ = await make(2, scheduler, policy=RoutingPolicy.ROUND_ROBIN)
    readers = [Reader(fleet.submit([request(fleet, [k, 2, 3])])) for k in range(4)]
    late = Reader(fleet.submit([request(fleet, [9, 2, 3])]))
    assert (await late.done()).errors == ["queue_full"], "when all have refused it"
    for reader in readers:
        assert (await reader.done()).errors == []
    assert fleet.moves.given_up == 0


async def test_an_abort_reaches_the_replica(make: MakeFleet) -> None:
    fleet, replicas = await make(2)
    message = request(fleet, [1, 2, 3], count=300)
    reader = Reader(fleet.submit([message]))
    await reader.until(2)
    fleet.abort(message.ids)
    await reader.done()
    assert reader.ends[message.ids[0]][0].finish_reason is FinishReason.ABORT
    while busy(replicas).stats.num_running:
        await asyncio.sleep(0)
    assert busy(replicas).stats.finished == {"abort": 1}


async def test_stop_ends_what_runs_and_what_waits(make: MakeFleet) -> None:
    fleet, [first, second] = await make(2)
    readers = [Reader(fleet.submit([request(fleet, [k, 2, 3], count=300)])) for k in range(4)]
    await readers[3].until(2)
    await first.die()
    await second.die()
    await asyncio.sleep(0.01)
    await fleet.stop()
    for reader in readers:
        assert (await reader.done()).errors == ["engine_dead"]


async def test_a_prompt_that_is_computed_while_all_stops_waits_for_nobody(make: MakeFleet) -> None:
    fleet, _ = await make(2, num_prefill=1, handover_min_tokens=8)
    reader = Reader(fleet.submit([request(fleet, list(range(12)))]))
    fleet._dispatcher.close(EngineDeadError("The server was stopped."))  # as `stop` does, before the engines have ended
    await reader.done()
    assert len(reader.only) == 1
    assert reader.errors == [NotReadyError.code]


async def test_readiness_is_that_of_the_best_replica(make: MakeFleet) -> None:
    fleet, [first, second] = await make(2)
    await first.die()
    assert fleet.ready
    await second.die()
    assert not fleet.ready
    assert not fleet.failed
    first.gone = second.gone = True
    assert fleet.failed


async def test_adapters_are_on_all_replicas_also_on_those_that_come_back(make: MakeFleet, tmp_path: Path) -> None:
    fleet, [first, second] = await make(2)
    (tmp_path / "adapter_config.json").write_text("{}")
    await second.die()
    await fleet.load_adapter("a", tmp_path)
    await second.start()
    async with asyncio.timeout(30):
        while fleet.replica_states()[1].missing_adapters:
            await asyncio.sleep(0.001)
    await first.die()
    message = AddRequest(
        fleet.new_ids(1), [1, 2, 3], SamplingParams(max_tokens=5, temperature=0), arrival_time=0.0, adapter="a"
    )
    reader = await Reader(fleet.submit([message])).done()
    assert reader.only == generate(SimulatedRunner(CONFIG).info, [1, 2, 3], 5, first_token_id=FIRST, adapter="a")


async def test_a_reset_empties_all_prefix_caches(make: MakeFleet) -> None:
    fleet, _ = await make(2)
    for _ in range(2):
        await Reader(fleet.submit([request(fleet, list(range(40)))])).done()
    assert fleet.stats.prefix_hits > 0
    assert sum(state.known_prefix_blocks for state in fleet.replica_states()) > 0
    await fleet.reset_prefix_cache()
    assert sum(state.known_prefix_blocks for state in fleet.replica_states()) == 0


async def test_replicas_must_be_of_one_model() -> None:
    other = MortalEngine(lambda: SimulatedRunner(SimulatedConfig(vocab_size=5000)))
    fleet = ReplicatedEngine([mortal(), other])
    with pytest.raises(EngineError, match="vocab_size"):
        await fleet.start()
    assert not other.ready


async def test_one_elsewhere_that_does_not_fit_gets_nothing() -> None:
    own, other = mortal(), MortalEngine(lambda: SimulatedRunner(SimulatedConfig(vocab_size=5000)))
    fleet = ReplicatedEngine([own, other], ReplicaSettings(policy=RoutingPolicy.ROUND_ROBIN), num_elsewhere=1)
    await fleet.start()
    for k in range(3):
        await Reader(fleet.submit([request(fleet, [k])])).done()
    assert (len(own.received), len(other.received)) == (3, 0)
    await fleet.stop()


async def test_one_elsewhere_that_comes_later_gets_its_share() -> None:
    gate = asyncio.Event()

    class Late(MortalEngine):
        async def start(self) -> None:
            await gate.wait()
            await super().start()

    own, late = mortal(), Late(lambda: SimulatedRunner(CONFIG))
    fleet = ReplicatedEngine([own, late], ReplicaSettings(policy=RoutingPolicy.ROUND_ROBIN), num_elsewhere=1)
    await fleet.start()
    await Reader(fleet.submit([request(fleet, [1])])).done()
    gate.set()
    async with asyncio.timeout(30):
        while not late.ready:
            await asyncio.sleep(0)
    await Reader(fleet.submit([request(fleet, [2])])).done()
    assert (len(own.received), len(late.received)) == (1, 1)
    await fleet.stop()


async def test_only_engines_elsewhere_of_which_none_can_be_reached() -> None:
    class Gone(MortalEngine):
        async def start(self) -> None:
            raise EngineError("nobody is there")

    fleet = ReplicatedEngine([Gone(lambda: SimulatedRunner(CONFIG)) for _ in range(2)], num_elsewhere=2)
    with pytest.raises(EngineError, match="nobody is there"):
        await fleet.start()


async def test_engines_that_compute_in_other_ways_do_not_resume_each_other() -> None:
    replicas = [mortal(), mortal()]
    replicas[1].fingerprint = "another"
    fleet = ReplicatedEngine(replicas)
    await fleet.start()
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    await reader.until(3)
    await busy(replicas).die()
    assert (await reader.done()).errors == ["engine_dead"]
    await fleet.stop()


async def test_one_that_comes_back_as_another_model_gets_nothing(
    make: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 3600.0)
    fleet, [first, second] = await make(2, policy=RoutingPolicy.ROUND_ROBIN)
    await second.die()
    second.becomes(SimulatedConfig(vocab_size=5000))
    await second.start()
    for k in range(3):
        await Reader(fleet.submit([request(fleet, [k])])).done()
    assert (len(first.received), len(second.received)) == (3, 0)
    assert [state.ready for state in fleet.replica_states()] == [True, False]
    await first.die()
    assert second.ready
    assert not fleet.ready, "the only engine that is there gets no requests"
    with pytest.raises(NotReadyError):
        fleet.submit([request(fleet, [9])])


async def test_a_stream_does_not_go_on_where_its_tokens_would_have_been_others(make: MakeFleet) -> None:
    fleet, [replica] = await make(1, resume_wait=0.05)
    reader = Reader(fleet.submit([request(fleet, [1, 2, 3])]))
    await reader.until(3)
    await replica.die()
    replica.fingerprint = "another"
    await replica.start()
    assert (await reader.done()).errors == ["engine_dead"]
    assert (await Reader(fleet.submit([request(fleet, [1, 2, 3])])).done()).errors == []


async def test_where_streams_must_be_resumed_an_engine_that_cannot_is_an_error() -> None:
    replicas = [mortal(), mortal()]
    replicas[1].fingerprint = "another"
    fleet = ReplicatedEngine(replicas, ReplicaSettings(resume_required=True))
    with pytest.raises(EngineError, match="resume: the replicas' engines, or their settings, differ"):
        await fleet.start()
    alone = ReplicatedEngine([SelfScheduling(lambda: SimulatedRunner(CONFIG))], ReplicaSettings(resume_required=True))
    with pytest.raises(EngineError, match="resume: an engine that uses its own scheduler"):
        await alone.start()


class SelfScheduling(MortalEngine):
    @property
    def info(self) -> ModelInfo:
        return msgspec.structs.replace(super().info, supports_resume=False)


async def test_what_an_engine_lost_is_told_once_also_where_its_counters_go_on() -> None:
    replica = Replica(0, unreachable := mortal())
    await unreachable.start()
    unreachable.counted = 5
    assert not replica.was_restarted()
    replica.lost()
    assert not replica.was_restarted(), "its connection broke, and its counters are what they were"
    unreachable.counted = 0
    assert not replica.was_restarted(), "it was its process that ended; that is known"
    unreachable.counted = 3
    assert not replica.was_restarted()
    unreachable.counted = 1
    assert replica.was_restarted()


async def test_what_has_ended_is_no_load_where_an_engine_counts_from_0_again() -> None:
    """As over a new connection to an engine elsewhere, after one that ended while nothing ran."""
    replica = Replica(0, elsewhere := mortal())
    await elsewhere.start()
    stream = elsewhere.submit([request(elsewhere, [1, 2, 3])])
    replica.sent(stream, 1, 3, 3)
    stream.arrival_number = 1000  # of the old connection
    await Reader(stream).done()
    assert replica.load().num_requests == 0
    await elsewhere.stop()


async def test_a_pulse_waits_for_the_replica_that_has_the_request(make: MakeFleet) -> None:
    fleet, _ = await make(2)
    for k in range(4):
        await Reader(fleet.submit([request(fleet, [k])])).done()
    stream = fleet.submit([request(fleet, [9])])
    assert not stream.is_taken_in(fleet.stats), "others' requests do not count for it"
    await Reader(stream).done()
    assert stream.is_taken_in(fleet.stats)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), number=st.integers(2, 4))
def test_whatever_dies_every_stream_is_what_it_would_have_been(seed: int, number: int) -> None:
    asyncio.run(_storm(random.Random(seed), number))


async def _storm(chance: random.Random, number: int) -> None:
    fleet, replicas = await started(number, {"max_num_seqs": 4})
    asked: list[tuple[Reader, AddRequest]] = []
    for k in range(20):
        prompt = [k, *chance.choices(range(50), k=chance.randint(1, 20))]
        params = chance.choice([GREEDY, {"temperature": 1.0, "seed": k}])
        message = request(fleet, prompt, chance.randint(1, 40), chance.choice([1, 1, 3]), **params)
        try:
            asked.append((Reader(fleet.submit([message])), message))
        except (NotReadyError, QueueFullError):
            assert not any(replica.ready for replica in replicas)
        for _ in range(chance.randint(0, 12)):
            await asyncio.sleep(0)
        victim = chance.choice(replicas)
        if victim.ready and chance.random() < 0.3:
            await victim.die()
        elif not victim.ready:
            await victim.start()
    for replica in replicas:
        if not replica.ready:
            await replica.start()
    for reader, message in asked:
        await reader.done()
        params = message.params
        assert isinstance(params, SamplingParams)
        for index, request_id in enumerate(message.ids):
            whole = expected(
                message.prompt_token_ids, params.max_tokens, None if params.seed is None else params.seed + index
            )
            [end], tokens = reader.ends[request_id], reader.tokens[request_id]
            assert tokens == (whole if end.error is None else whole[: len(tokens)])
            assert end.error is None or fleet.moves.given_up, "unless too many died with it in a row"
    assert fleet.stats.num_running == fleet.stats.num_waiting == 0
    await fleet.stop()
