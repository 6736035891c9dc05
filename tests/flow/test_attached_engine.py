"""Several processes on one engine: what each gets, and what the others notice when one of them, or the engine, dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput, SamplingParams, StepRecord
from penstock.engines.door.attached import AttachedEngine
from penstock.engines.door.keys import new_key
from penstock.engines.door.spec import DoorAddress, DoorSpec
from penstock.engines.errors import (
    EngineError,
    NotReadyError,
    PayloadTooLargeError,
    PermissionDeniedError,
    QueueFullError,
)
from penstock.engines.host.content_digest import ModelDigests
from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.liveness import EngineHealth, Liveness, WatchdogConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.replicas.merged_stats import MergedStats
from penstock.engines.scheduler.config import SchedulerConfig
from support.adapters import save_adapter
from support.door import idle
from support.processes import listening_ports

Owner = tuple[ProcessEngine, DoorAddress]
Own = Callable[..., Awaitable[Owner]]
Attach = Callable[..., Awaitable[AttachedEngine]]
MARKER = 99


@pytest.fixture
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Own]:
    """Starts an engine process with a door."""
    engines: list[ProcessEngine] = []

    async def start(
        scheduler: SchedulerConfig | None = None, watchdog: WatchdogConfig | None = None, **door: object
    ) -> Owner:
        options = {"num_blocks": 4096, "first_token_id": 100, "latency": {"per_step": 0.005}, "max_loras": 2}
        options["faults"] = f"hang={MARKER}"
        address = door.pop("address", None) or f"ipc://{tmp_path_factory.mktemp('d')}/door"
        spec = DoorSpec(address=str(address), **door)  # type: ignore[arg-type]
        settings = scheduler or SchedulerConfig()
        engine = ProcessEngine(EngineSpec(runner="simulated", options=options, door=spec, scheduler=settings), watchdog)
        engines.append(engine)
        await engine.start()
        return engine, DoorAddress(spec.address, spec.key)

    yield start
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def attach() -> AsyncIterator[Attach]:
    engines: list[AttachedEngine] = []

    async def start(door: DoorAddress, **options: object) -> AttachedEngine:
        engine = AttachedEngine(door, **options)  # type: ignore[arg-type]
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.stop()


AnyEngine = AttachedEngine | ProcessEngine


def submit(engine: AnyEngine, *, n: int = 1, max_tokens: int = 8, **fields: object) -> RequestStream:
    prompt = fields.pop("prompt", [1, 2, 3])
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    request = AddRequest(engine.new_ids(n), prompt, sampling, arrival_time=time.monotonic(), **fields)  # type: ignore[arg-type]
    return engine.submit([request])


async def collect(stream: RequestStream) -> list[RequestOutput]:
    async with asyncio.timeout(60):
        return [output async for outputs in stream for output in outputs]


def ends(outputs: list[RequestOutput]) -> list[tuple[FinishReason, str | None]]:
    return [(o.finish_reason, o.error.code if o.error else None) for o in outputs if o.finish_reason is not None]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_two_clients_and_the_owner_each_get_their_own(own: Own, attach: Attach) -> None:
    engine, door = await own()
    first, second = await attach(door), await attach(door)
    each = [first, second, engine]
    asked = [submit(one, prompt=[number + 1], n=2) for one in each for number in range(4)]
    answers = [await collect(stream) for stream in asked]
    assert all(ends(answer) == [(FinishReason.LENGTH, None)] * 2 for answer in answers)
    for number in range(4):
        assert (
            sorted(tokens(answers[number]))
            == sorted(tokens(answers[4 + number]))
            == sorted(tokens(answers[8 + number]))
        )
    assert first.info == engine.info
    await until(lambda: all(one.stats.admitted == 24 and idle(lambda one=one: one.stats) for one in each))
    assert [one.stats.own_admitted for one in each] == [8, 8, 8]


async def test_steps_are_told_to_those_who_want_to_know(own: Own, attach: Attach) -> None:
    _, door = await own()
    seen: list[StepRecord] = []
    curious, other = await attach(door, on_step=seen.append), await attach(door)
    await collect(submit(other, max_tokens=5))
    await until(lambda: curious.stats.steps == 5)
    assert [step.num_tokens for step in seen] == [3, 1, 1, 1, 1]


async def test_deadlines_aborts_and_the_time_in_the_queue(own: Own, attach: Attach) -> None:
    _, door = await own()
    engine = await attach(door)
    late = await collect(submit(engine, max_tokens=4000, deadline=time.monotonic() + 0.1))
    assert ends(late) == [(FinishReason.ERROR, "deadline_exceeded")]
    stream = submit(engine, max_tokens=4000, n=3, traced=True)
    [output, *_] = await anext(stream)
    assert output.prompt is not None
    assert output.prompt.chunks is not None
    assert 0 <= output.prompt.queue_seconds < 30
    assert abs(time.monotonic() - output.prompt.chunks[0].done) < 30
    stream.close()
    await until(lambda: idle(lambda: engine.stats))
    assert engine.stats.finished == {"error:deadline_exceeded": 1, "abort": 3}


async def test_a_client_that_is_killed_under_load_costs_the_others_nothing(own: Own, attach: Attach) -> None:
    owner, door = await own()
    engine = await attach(door)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, door.address, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        streams = [submit(engine, prompt=[number + 1], max_tokens=60) for number in range(20)]
        await anext(streams[0])
        assert engine.stats.num_running > 20
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    killed_at = time.monotonic()
    for stream in streams:
        assert ends(await collect(stream)) == [(FinishReason.LENGTH, None)]
    await until(lambda: idle(lambda: owner.stats))
    assert time.monotonic() - killed_at < 20, "nobody waits for the client's silence"
    assert owner.stats.finished == {"length": 20, "abort": 30}
    assert owner.stats.num_free_blocks == owner.info.num_blocks


CLIENT = """
import asyncio, sys, time
from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.door.attached import AttachedEngine
from penstock.engines.door.spec import DoorAddress

async def main():
    engine = AttachedEngine(DoorAddress(sys.argv[1]))
    await engine.start()
    sampling = SamplingParams(max_tokens=10_000)
    ids = engine.new_ids(30)
    stream = engine.submit([AddRequest((i,), [i + 1], sampling, arrival_time=time.monotonic()) for i in ids])
    seen = set()
    async for outputs in stream:
        seen |= {output.id for output in outputs}
        if len(seen) == 30:
            print("running", flush=True)
            seen.clear()

asyncio.run(main())
"""


async def test_kill_9_of_the_engine_ends_all_streams_once_and_everybody_comes_back(own: Own, attach: Attach) -> None:
    owner, door = await own()
    clients = [await attach(door), await attach(door)]
    streams = [submit(client, n=3, max_tokens=4000) for client in clients for _ in range(4)]
    await anext(streams[0])
    await anext(streams[-1])
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    for stream in streams:
        assert ends(await collect(stream)) == [(FinishReason.ERROR, "engine_dead")] * 3
    for client in clients:
        with pytest.raises(NotReadyError):
            submit(client)
    await until(lambda: all(client.ready for client in clients))
    for client in clients:
        assert ends(await collect(submit(client))) == [(FinishReason.LENGTH, None)]
        assert client.num_restarts == 1
        assert not client.failed
    await until(lambda: idle(lambda: owner.stats))


async def test_an_engine_that_hangs_is_not_ready_for_anybody(own: Own, attach: Attach) -> None:
    watchdog = WatchdogConfig(ready_timeout=0.5, timeout=1.5)
    _, door = await own(watchdog=watchdog)
    engine = await attach(door, watchdog=watchdog)
    assert engine.ready
    stream = submit(engine, prompt=[1, MARKER])
    await until(lambda: not engine.ready)
    assert ends(await collect(stream)) == [(FinishReason.ERROR, "engine_dead")]
    await until(lambda: engine.ready)


class StoodStill(Liveness):
    """As a process sees an engine right after it was stopped (SIGSTOP) for long: what has come is unread."""

    looks = 0

    def judge(self, now: float) -> EngineHealth:
        self.looks += 1
        return EngineHealth.HUNG if self.looks == 1 else super().judge(now)


async def test_a_client_that_stood_still_looks_again_before_it_calls_an_engine_dead(own: Own, attach: Attach) -> None:
    _, door = await own()
    engine = await attach(door, watchdog=WatchdogConfig(ready_timeout=0.4, timeout=30))
    stream = submit(engine, max_tokens=200)
    await anext(stream)
    engine.liveness = still = StoodStill(WatchdogConfig(), time.monotonic())
    assert ends(await collect(stream)) == [(FinishReason.LENGTH, None)]
    await until(lambda: still.looks > 2)
    assert engine.num_restarts == 0


async def test_counters_go_on_when_a_connection_breaks(own: Own, attach: Attach) -> None:
    """Of one engine and of the sum over replicas: what is counted again would be twice the load."""
    owner, door = await own()
    engine, merged = await attach(door), MergedStats(1)
    for number in range(3):
        await collect(submit(engine, prompt=[number + 1]))
    await until(lambda: engine.stats.finished == {"length": 3})
    before = merged.merge([engine.stats])
    assert engine._connection is not None
    engine._connection.end("the network broke")
    while engine.ready:
        await asyncio.sleep(0)
    broken = merged.merge([engine.stats])
    assert (broken.num_blocks, engine.stats.num_blocks) == (0, 0)
    await until(lambda: engine.ready)
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]
    await until(lambda: engine.stats.finished == {"length": 4})
    after = merged.merge([engine.stats])
    seen = [(each.admitted, each.generation_tokens, each.finished) for each in (before, broken, after)]
    assert seen == [(3, 24, {"length": 3}), (3, 24, {"length": 3}), (4, 32, {"length": 4})]
    assert engine.stats.own_admitted == 1, "of this connection"
    assert owner.num_restarts == 0


async def test_the_owner_decides_which_adapters_there_are(own: Own, attach: Attach, tmp_path: Path) -> None:
    owner, door = await own()
    told: list[tuple[tuple[str, ...], int]] = []
    engine = await attach(door, on_adapters=lambda keys, room: told.append((keys, room)))
    with pytest.raises(PermissionDeniedError):
        await engine.load_adapter("mine:1", tmp_path)
    with pytest.raises(PermissionDeniedError):
        await engine.unload_adapter("mine:1")
    assert ends(await collect(submit(engine, adapter="theirs:1"))) == [(FinishReason.ERROR, "not_found")]
    await owner.load_adapter("theirs:1", save_adapter(tmp_path / "adapter"))
    await until(lambda: engine.adapters == ("theirs:1",))
    with_adapter = await collect(submit(engine, adapter="theirs:1"))
    assert ends(with_adapter) == [(FinishReason.LENGTH, None)]
    assert tokens(with_adapter) == tokens(await collect(submit(owner, adapter="theirs:1")))
    await owner.unload_adapter("theirs:1")
    await until(lambda: engine.adapters == ())
    assert told == [((), 2), (("theirs:1",), 2), ((), 2)]


async def test_any_client_may_empty_the_prefix_cache(own: Own, attach: Attach) -> None:
    _, door = await own()
    engine = await attach(door)
    prompt = list(range(1, 65))
    for _ in range(2):
        await collect(submit(engine, prompt=prompt))
    await until(lambda: engine.stats.prefix_hits > 0)
    hits = engine.stats.prefix_hits
    await engine.reset_prefix_cache()
    await collect(submit(engine, prompt=prompt))
    assert engine.stats.prefix_hits == hits


async def test_what_cannot_be_sent_is_refused_here(own: Own, attach: Attach) -> None:
    _, door = await own(
        max_message_bytes=2000,
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_queued_requests=2),
    )
    engine = await attach(door)
    with pytest.raises(PayloadTooLargeError):
        submit(engine, prompt=[300] * 1000)
    streams = []
    with pytest.raises(QueueFullError):
        streams.extend(submit(engine) for _ in range(1000))
    found = [ends(await collect(stream)) for stream in streams]
    assert (
        {(FinishReason.LENGTH, None)}
        <= {each for [each] in found}
        <= {
            (FinishReason.LENGTH, None),
            (FinishReason.ERROR, "queue_full"),
        }
    )


async def test_over_tcp_both_sides_need_the_same_key(own: Own, attach: Attach) -> None:
    key = new_key()
    owner, _ = await own(address="tcp://127.0.0.1:*", key=key)
    assert owner.pid is not None
    [port] = listening_ports(owner.pid)
    reached = DoorAddress(f"tcp://127.0.0.1:{port}", key)
    engine = await attach(reached)
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]
    for wrong in (new_key(), ""):
        with pytest.raises(EngineError, match="another key"):
            await attach(DoorAddress(reached.address, wrong))
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]


async def test_another_model_or_another_policy_is_refused(own: Own, attach: Attach) -> None:
    _, door = await own(model=ModelDigests("a tokenizer", "weights"))
    for same in (ModelDigests("a tokenizer", "weights"), ModelDigests("a tokenizer"), ModelDigests()):
        await attach(door, model=same, policy="fcfs")
    with pytest.raises(EngineError, match="another model: it has a different configuration or tokenizer"):
        await attach(door, model=ModelDigests("another", "weights"))
    with pytest.raises(EngineError, match="another model: it has a different weights"):
        await attach(door, model=ModelDigests("a tokenizer", "others"))
    with pytest.raises(EngineError, match="policy is fcfs, not fair"):
        await attach(door, policy="fair")


async def test_nobody_waits_longer_than_the_load_timeout_for_an_engine(attach: Attach, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"within 0.3 s \(load-timeout\)"):
        await attach(DoorAddress(f"ipc://{tmp_path}/nobody"), watchdog=WatchdogConfig(load_timeout=0.3))


async def test_an_engine_that_is_still_loading_is_waited_for(own: Own, attach: Attach, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/door"
    waiting = asyncio.create_task(attach(DoorAddress(address)))
    await asyncio.sleep(0)
    await own(address=address)
    engine = await waiting
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]


async def test_stopping_one_side_ends_its_requests_alone(own: Own, attach: Attach) -> None:
    owner, door = await own()
    first, second = await attach(door), await attach(door)
    mine, theirs = submit(first, max_tokens=4000), submit(second, max_tokens=100)
    await anext(mine)
    await first.stop()
    assert ends(await collect(mine)) == [(FinishReason.ERROR, "engine_dead")]
    assert ends(await collect(theirs)) == [(FinishReason.LENGTH, None)]
    await until(lambda: idle(lambda: owner.stats))
    assert owner.stats.finished == {"length": 1, "abort": 1}
    await first.start()
    assert ends(await collect(submit(first))) == [(FinishReason.LENGTH, None)]


async def test_an_engine_that_drains_ends_what_it_has_begun_and_takes_nothing_new(own: Own, attach: Attach) -> None:
    owner, door = await own()
    engine = await attach(door)
    running = submit(engine, max_tokens=200)
    await anext(running)
    draining = asyncio.create_task(owner.drain())
    await until(lambda: not engine.ready)
    assert not draining.done()
    with pytest.raises(NotReadyError, match="being shut down"):
        submit(engine)
    assert ends(await collect(running)) == [(FinishReason.LENGTH, None)]
    await draining
    late = AttachedEngine(door, WatchdogConfig(load_timeout=0.3))
    with pytest.raises(EngineError, match="no engine was at"):
        await late.start()
    await owner.stop()
    await owner.start()
    await until(lambda: engine.ready)
    assert ends(await collect(submit(engine))) == [(FinishReason.LENGTH, None)]


async def test_an_engine_that_dies_while_it_drains_is_waited_for_no_longer(own: Own, attach: Attach) -> None:
    owner, door = await own()
    engine = await attach(door)
    running = submit(engine, max_tokens=4000)
    await anext(running)
    draining = asyncio.create_task(owner.drain())
    await until(lambda: not engine.ready)
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    await draining
    assert ends(await collect(running)) == [(FinishReason.ERROR, "engine_dead")]


async def test_an_engine_that_is_stopped_while_it_drains_is_waited_for_no_longer(
    own: Own, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engines.process.client._ENDING_SECONDS", 0.2)
    owner, door = await own()
    engine = await attach(door)
    running = submit(engine, max_tokens=4000)
    await anext(running)
    draining = asyncio.create_task(owner.drain())
    await until(lambda: not engine.ready)
    await owner.stop()
    async with asyncio.timeout(60):
        await draining
    assert ends(await collect(running)) == [(FinishReason.ERROR, "engine_dead")]
