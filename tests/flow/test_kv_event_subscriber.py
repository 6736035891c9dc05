"""A subscriber to the KV events of a server: it knows what is cached there, or knows that it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.engines.contract.messages import ResetPrefixCache
from penstock.engines.core import EngineCore
from penstock.engines.kv_events import subscriber as module
from penstock.engines.kv_events.index import CacheIndex, PromptHashes
from penstock.engines.kv_events.settings import KVEventsConfig, KVEventsSource
from penstock.engines.kv_events.subscriber import KVEventSubscriber
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import BlockHasher, KVGroup
from support.engine import Driver
from support.server import free_port

SIZE = 4
HASHER = BlockHasher()
Start = Callable[..., KVEventSubscriber]


def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
async def follow() -> AsyncIterator[Start]:
    running: list[KVEventSubscriber] = []

    def _follow(source: KVEventsSource) -> KVEventSubscriber:
        running.append(KVEventSubscriber(source, CacheIndex(HASHER, "m"), "m at host"))
        running[-1].start()
        return running[-1]

    yield _follow
    for subscriber in running:
        subscriber.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def matched(subscriber: KVEventSubscriber, tokens: list[int]) -> int:
    return subscriber.index.matched(PromptHashes(HASHER, tokens))


class Publisher:
    """A server of any kind, which keeps what it has published."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.source = KVEventsSource(endpoint=endpoint(), replay_endpoint=endpoint(), topic="kv")
        self.number = 0
        self.kept: list[tuple[bytes, bytes]] = []
        self.bind()

    def bind(self) -> None:
        self._public: Any = self._context.socket(zmq.XPUB)
        self._public.bind(self.source.endpoint)
        self._replay: Any = self._context.socket(zmq.ROUTER)
        self._replay.bind(self.source.replay_endpoint)

    async def subscribed(self) -> None:
        await until(lambda: bool(self._public.poll(0)))
        assert self._public.recv() == b"\1kv"

    def publish(self, tokens: list[int], *, lost: bool = False, seconds: float = 1.0) -> None:
        """One block of these tokens."""
        event = ["BlockStored", [tokens[0]], None, tokens, len(tokens), None]
        batch = msgspec.msgpack.encode([seconds, [event], 0])
        parts = self.number.to_bytes(8, "big"), batch
        self.number += 1
        self.kept.append(parts)
        if not lost:
            self._public.send_multipart((b"kv@host", *parts))

    def send(self, *parts: bytes) -> None:
        self._public.send_multipart(parts)

    async def replay(self, *, topic: bool = False) -> int:
        """Answers one request for what was missed, and returns the number in it."""
        await until(lambda: bool(self._replay.poll(0)))
        client, empty, number = self._replay.recv_multipart()
        for parts in self.kept:
            if parts[0] >= number:
                self._replay.send_multipart((client, empty, *((b"kv@host",) if topic else ()), *parts))
        self._replay.send_multipart((client, empty, *((b"",) if topic else ()), b"\xff" * 8, b""))
        return int.from_bytes(number, "big")

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    server = Publisher()
    yield server
    server.close()


@pytest.mark.parametrize("groups", [(KVGroup(SIZE),), (KVGroup(SIZE), KVGroup(SIZE, 6))], ids=["one group", "a window"])
async def test_it_knows_what_an_engine_of_ours_has_cached(follow: Start, groups: tuple[KVGroup, ...]) -> None:
    source = KVEventsSource(endpoint=endpoint(), replay_endpoint=endpoint(), topic="kv@")
    config = KVEventsConfig(endpoint=source.endpoint, replay=source.replay_endpoint, topic="kv@host@m")
    driver = Driver(SimulatedRunner(SimulatedConfig(kv_groups=groups, num_blocks=16 * len(groups))), kv_events=config)
    assert isinstance(driver.core, EngineCore)
    try:
        prompts = [[100 + 50 * number + n for n in range(30)] for number in range(3)]
        driver.add(prompts[0], 3)
        driver.run()
        subscriber = follow(source)
        await until(lambda: subscriber.live)
        assert matched(subscriber, prompts[0]) == 28, "from before it came"
        for prompt in prompts[1:]:  # the cache holds little more than one of them
            driver.add(prompt, 3)
            driver.run()
            await until(lambda prompt=prompt: matched(subscriber, prompt) == 28)  # type: ignore[misc]
        assert matched(subscriber, prompts[0]) < 28
        driver._inbox.append(ResetPrefixCache(1))
        driver.step()
        await until(lambda: len(subscriber.index) == 0)
        assert subscriber.losses == 0
    finally:
        driver.core.close()


@pytest.mark.parametrize("topic", [False, True], ids=["as vLLM replays", "as we replay"])
async def test_what_was_missed_is_replayed(follow: Start, publisher: Publisher, topic: bool) -> None:
    publisher.publish([1, 2], lost=True)
    subscriber = follow(publisher.source)
    assert await publisher.replay(topic=topic) == 0
    await publisher.subscribed()
    await until(lambda: subscriber.live)
    assert matched(subscriber, [1, 2]) == 2
    publisher.publish([3, 4], lost=True)
    publisher.publish([5, 6])
    publisher.publish([7, 8])
    publisher.kept.pop()  # the replay ends before what came live meanwhile
    assert await publisher.replay(topic=topic) == 1
    publisher.publish([9, 9])
    await until(lambda: matched(subscriber, [9, 9]) == 2)
    assert [matched(subscriber, [n, n + 1]) for n in (1, 3, 5, 7)] == [2, 2, 2, 2]
    assert subscriber.losses == 0


async def test_a_flood_is_read_to_its_end(follow: Start, publisher: Publisher) -> None:
    subscriber = follow(KVEventsSource(endpoint=publisher.source.endpoint, topic="kv"))
    await publisher.subscribed()
    for number in range(900):
        publisher.publish([number, number])
    await until(lambda: len(subscriber.index) == 900)
    assert subscriber.losses == 0


async def test_a_gap_that_is_not_filled_costs_the_index(follow: Start, publisher: Publisher) -> None:
    subscriber = follow(publisher.source)
    await publisher.replay()
    await publisher.subscribed()
    publisher.publish([1, 2])
    await until(lambda: matched(subscriber, [1, 2]) == 2)
    publisher.publish([3, 4], lost=True)
    publisher.kept.clear()
    publisher.publish([5, 6])
    await publisher.replay()
    await until(lambda: matched(subscriber, [5, 6]) == 2)
    assert (matched(subscriber, [1, 2]), subscriber.losses) == (0, 1)


async def test_without_a_replay_endpoint_a_gap_costs_the_index(follow: Start, publisher: Publisher) -> None:
    subscriber = follow(KVEventsSource(endpoint=publisher.source.endpoint, topic="kv"))
    await publisher.subscribed()
    publisher.number = 500  # it has run for a while
    publisher.publish([1, 2])
    await until(lambda: matched(subscriber, [1, 2]) == 2)
    await until(lambda: subscriber.live)
    publisher.publish([3, 4], lost=True)
    publisher.publish([5, 6])
    await until(lambda: matched(subscriber, [5, 6]) == 2)
    assert (matched(subscriber, [1, 2]), subscriber.losses) == (0, 1)


async def test_another_process_behind_the_same_connection_is_noticed(follow: Start, publisher: Publisher) -> None:
    subscriber = follow(KVEventsSource(endpoint=publisher.source.endpoint, topic="kv"))
    await publisher.subscribed()
    publisher.number = 500
    publisher.publish([1, 2], seconds=1.0)
    publisher.number = 0
    publisher.publish([3, 4], seconds=2.0)
    await until(lambda: matched(subscriber, [3, 4]) == 2)
    assert matched(subscriber, [1, 2]) == 0


async def test_a_lost_connection_costs_the_index_and_is_made_again(follow: Start, publisher: Publisher) -> None:
    subscriber = follow(publisher.source)
    await publisher.replay()
    await publisher.subscribed()
    publisher.publish([1, 2])
    await until(lambda: matched(subscriber, [1, 2]) == 2)
    publisher._public.close(linger=0)
    publisher._replay.close(linger=0)
    await until(lambda: not subscriber.live)
    assert len(subscriber.index) == 0
    publisher.kept.clear()
    publisher.publish([3, 4], lost=True)
    publisher.bind()
    await publisher.replay()
    await until(lambda: subscriber.live)
    assert (matched(subscriber, [1, 2]), matched(subscriber, [3, 4]), subscriber.losses) == (0, 2, 1)


async def test_a_replay_that_does_not_come_is_given_up(
    follow: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_REPLAY_SECONDS", 0.01)
    publisher.publish([1, 2], lost=True)
    subscriber = follow(publisher.source)
    await publisher.subscribed()
    await until(lambda: subscriber.live)
    assert "does not replay" in caplog.text
    publisher.publish([3, 4])
    await until(lambda: matched(subscriber, [3, 4]) == 2)


SECOND = (1).to_bytes(8, "big")
GOOD = msgspec.msgpack.encode([1.0, [], 0])


@pytest.mark.parametrize(
    "parts",
    [
        (b"kv", SECOND, b"\xc1"),
        (b"kv", b"\0" * 7, GOOD),
        (b"kv",),
        (b"kv", b"", b"", b"", GOOD),
        (b"kv", SECOND, msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], -1, None]], 0])),
    ],
    ids=["no batch", "no number", "one part", "more parts", "no block"],
)
async def test_what_cannot_be_read_costs_the_index_and_a_pause(
    follow: Start,
    publisher: Publisher,
    parts: tuple[bytes, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_REST_SECONDS", 0.02)
    subscriber = follow(KVEventsSource(endpoint=publisher.source.endpoint, topic="kv"))
    await publisher.subscribed()
    publisher.publish([1, 2])
    await until(lambda: matched(subscriber, [1, 2]) == 2)
    publisher.send(*parts)
    await until(lambda: "cannot be read" in caplog.text)
    assert (len(subscriber.index), subscriber.live) == (0, False)
    await until(lambda: subscriber.live)

    def goes_on() -> bool:
        """What is sent before the publisher has heard of the new subscription is lost."""
        publisher.publish([3, 4])
        return matched(subscriber, [3, 4]) == 2

    await until(goes_on)
    assert caplog.text.count("cannot be read") == 1


async def test_a_message_beyond_the_bound_is_not_taken_in(
    follow: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_REST_SECONDS", 0.02)
    subscriber = follow(KVEventsSource(endpoint=publisher.source.endpoint, topic="kv"))
    await publisher.subscribed()
    publisher.publish([1, 2])
    await until(lambda: matched(subscriber, [1, 2]) == 2)
    publisher.send(b"kv", b"\0" * 8, bytes(module._MOST_MESSAGE + 1))
    await until(lambda: subscriber.losses == 1)
    await until(lambda: subscriber.live)
    assert "cannot be read" not in caplog.text


async def test_an_address_that_speaks_something_else_is_tried_again_later(
    follow: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_REST_SECONDS", 0.02)
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        subscriber = follow(KVEventsSource(endpoint=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await until(lambda: connections > 2)
        assert not subscriber.live
        subscriber.stop()
    assert caplog.text.count("there is no connection") == 1


async def test_who_stopped_holds_nothing(follow: Start, publisher: Publisher) -> None:
    subscriber = follow(publisher.source)
    await publisher.subscribed()
    subscriber.stop()
    subscriber.stop()
    assert (subscriber.live, subscriber._public, subscriber._replay, subscriber._timer) == (False, None, None, None)
