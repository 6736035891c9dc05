"""Events about the prefix cache: who follows them knows what is cached, also after a gap."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.engines.contract.messages import ResetPrefixCache
from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.kv_events.messages import public_hash
from penstock.engines.kv_events.publisher import _PublishingThread
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import KVGroup
from support.engine import Driver
from support.server import free_port

SIZE = 4
WINDOWS = (KVGroup(SIZE), KVGroup(SIZE, 6))
SECONDS = 20_000
"""Milliseconds that a message may take."""


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class Follower:
    """Reads a publisher's messages and keeps an index of them, as a router does."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._context = zmq.Context()
        self._public = self._context.socket(zmq.SUB)
        self._public.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._public.connect(config.endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(config.replay)
        self.next_number = 0
        self.num_gaps = 0
        self.index: dict[tuple[int, int], dict[str, Any]] = {}
        """What is known of each (group, hash)."""

    def catch_up(self) -> int:
        """Asks for all that it lacks; returns how many batches that were."""
        self._replay.send_multipart((b"", self.next_number.to_bytes(8, "big")))
        count = 0
        while True:
            assert self._replay.poll(SECONDS)
            _, topic, number, batch = self._replay.recv_multipart()
            if not batch:
                assert int.from_bytes(number, "big", signed=True) == -1
                return count
            self._take(topic, number, batch)
            count += 1

    def hears(self) -> bool:
        """Whether there is a message on the public socket, where the publisher knows of it."""
        return bool(self._public.poll(10))

    def follow(self, until: Callable[[], bool]) -> None:
        """Reads the public socket, and asks for what is missing before a message."""
        while not until():
            assert self._public.poll(SECONDS)
            topic, number, batch = self._public.recv_multipart()
            if int.from_bytes(number, "big") > self.next_number:
                self.num_gaps += 1
                self.catch_up()
            self._take(topic, number, batch)

    def lose_one(self) -> None:
        assert self._public.poll(SECONDS)
        self._public.recv_multipart()

    def _take(self, topic: bytes, number: bytes, batch: bytes) -> None:
        assert topic == b"kv@host@m"
        if int.from_bytes(number, "big") < self.next_number:
            return  # it was replayed already
        assert int.from_bytes(number, "big") == self.next_number, "a gap"
        self.next_number += 1
        timestamp, events, rank = msgspec.msgpack.decode(batch)
        assert timestamp > 1e9
        assert rank == 3
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event.pop("type")
        if kind == "AllBlocksCleared":
            self.index.clear()
        elif kind == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                del self.index[event["group_idx"], block_hash]
        else:
            assert kind == "BlockStored"
            self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        size, parent, tokens = event["block_size"], event["parent_block_hash"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        for index, block_hash in enumerate(event["block_hashes"]):
            known = {
                "parent": parent,
                "tokens": tokens[index * size : (index + 1) * size],
                "adapter": event["lora_name"],
            }
            self.index[event["group_idx"], block_hash] = known
            parent = block_hash

    def prompt_of(self, key: tuple[int, int]) -> list[int]:
        """All tokens up to and with this block."""
        known = self.index[key]
        before = [] if known["parent"] is None else self.prompt_of((key[0], known["parent"]))
        return before + known["tokens"]

    def close(self) -> None:
        self._context.destroy(linger=0)


Start = Callable[..., Driver]


@pytest.fixture
def config() -> KVEventsConfig:
    return KVEventsConfig(endpoint=free_endpoint(), replay=free_endpoint(), topic="kv@host@m", rank=3)


@pytest.fixture
def start(config: KVEventsConfig) -> Iterator[Start]:
    drivers: list[Driver] = []

    def _start(groups: tuple[KVGroup, ...] = (KVGroup(SIZE),), num_blocks: int = 12) -> Driver:
        runner = SimulatedRunner(SimulatedConfig(kv_groups=groups, num_blocks=num_blocks * len(groups)))
        drivers.append(Driver(runner, kv_events=config))
        return drivers[-1]

    yield _start
    for driver in drivers:
        driver.core.close()


@pytest.fixture
def follower(config: KVEventsConfig) -> Iterator[Follower]:
    made = Follower(config)
    yield made
    made.close()


def cached(driver: Driver) -> set[tuple[int, int]]:
    """(group, hash) of all blocks that the pool has."""
    assert isinstance(driver.core, EngineCore)
    keys = driver.core.scheduler.kv.pool._by_hash
    return {(key[16] if len(key) > 16 else 0, public_hash(key[:16])) for key in keys}


def serve(driver: Driver, prompt: list[int], **params: Any) -> None:
    driver.add(prompt, 3, **params)
    driver.run()


@pytest.mark.parametrize("groups", [(KVGroup(SIZE),), WINDOWS], ids=["one group", "a window"])
def test_a_follower_knows_what_is_cached(start: Start, follower: Follower, groups: tuple[KVGroup, ...]) -> None:
    driver = start(groups)
    prompts = [[100 + 50 * k + n for n in range(30)] for k in range(3)]
    for prompt in [*prompts, prompts[0][:18], *prompts]:  # the cache holds little more than one of them
        serve(driver, prompt)
        follower.catch_up()
        assert follower.index.keys() == cached(driver)
    whole = {tuple(follower.prompt_of(key)) for key in follower.index if key[0] == 0}
    assert max(whole, key=len)[:28] == tuple(prompts[-1][:28])


def test_who_misses_a_message_notices_and_asks_for_it(start: Start, follower: Follower) -> None:
    driver = start(num_blocks=64)
    while not follower.hears():
        serve(driver, [2, *range(10 + driver._next_id)])
    follower.catch_up()
    serve(driver, list(range(300, 320)))
    follower.follow(lambda: follower.index.keys() == cached(driver))
    assert follower.num_gaps == 0
    serve(driver, list(range(400, 408)))
    follower.lose_one()
    serve(driver, list(range(500, 520)))
    follower.follow(lambda: follower.index.keys() == cached(driver))
    assert follower.num_gaps == 1
    assert follower.catch_up() == 0


def test_a_cleared_cache_is_told(start: Start, follower: Follower) -> None:
    driver = start()
    serve(driver, list(range(100, 120)))
    driver._inbox.append(ResetPrefixCache(1))
    driver.step()
    follower.catch_up()
    assert cached(driver) == follower.index.keys() == set()


def test_blocks_name_the_adapter_that_computed_them(start: Start, follower: Follower) -> None:
    driver = start()
    serve(driver, list(range(100, 112)), adapter="team/tuned:3")
    serve(driver, list(range(100, 112)))
    follower.catch_up()
    assert {known["adapter"] for known in follower.index.values()} == {"team/tuned", None}
    assert follower.index.keys() == cached(driver)


def test_a_process_begins_by_saying_that_nothing_is_cached(start: Start, follower: Follower) -> None:
    """Who has followed the one before learns by it that all is gone."""
    follower.index[0, 1] = {"parent": None, "tokens": [1], "adapter": None}
    driver = start()
    serve(driver, list(range(100, 120)))
    follower.catch_up()
    assert follower.index.keys() == cached(driver)


def test_an_address_that_is_in_use_is_waited_for(
    start: Start, follower: Follower, config: KVEventsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that this one replaces may still have it."""
    before = start()
    driver = start()
    assert f"{config.endpoint} is in use" in caplog.text
    serve(driver, list(range(100, 120)))
    assert isinstance(before.core, EngineCore)
    assert before.core.kv_events is not None
    before.core.kv_events.close()
    follower.catch_up()
    while follower.index.keys() != cached(driver):  # the first answers may be the old one's
        follower.next_number = 0
        follower.catch_up()


def test_an_address_with_another_fault_meanwhile_is_tried_again(
    start: Start, follower: Follower, config: KVEventsConfig, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    before = start()
    bind, faults = _PublishingThread._bind, [errno.EACCES, errno.EACCES]

    def faulty(self: _PublishingThread) -> list[tuple[str, int]]:
        return [(config.endpoint, faults.pop())] if faults and self._complaints else bind(self)

    monkeypatch.setattr(_PublishingThread, "_bind", faulty)
    driver = start()
    serve(driver, list(range(100, 120)))
    assert isinstance(before.core, EngineCore)
    assert before.core.kv_events is not None
    before.core.kv_events.close()
    follower.catch_up()
    while follower.index.keys() != cached(driver):
        follower.next_number = 0
        follower.catch_up()
    assert caplog.text.count("it will be retried") == 1


def test_what_cannot_be_is_refused(config: KVEventsConfig) -> None:
    for endpoint in (
        "",
        "5557",
        "ipc:///tmp/x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://host:5557",
        "tcp://*:x",
    ):
        with pytest.raises(ValueError, match="kv-events"):
            KVEventsConfig(endpoint=endpoint)
    with pytest.raises(ValueError, match="a port of its own"):
        KVEventsConfig(endpoint="tcp://*:5557", replay="tcp://*:5557")
    with pytest.raises(ValueError, match="prefix-caching is off"):
        SchedulerConfig(kv_events=config, enable_prefix_caching=False)
    elsewhere = KVEventsConfig(endpoint="tcp://192.0.2.1:5557")
    with pytest.raises(EngineError, match=r"192\.0\.2\.1"):
        Driver(SimulatedRunner(SimulatedConfig()), kv_events=elsewhere)
    spec = EngineSpec(runner="simulated", options={}, scheduler=SchedulerConfig(kv_events=config), scheduling="engine")
    with pytest.raises(UnsupportedError, match="--kv-events"):
        load_core(spec, lambda: 0.0)


@pytest.mark.parametrize(
    ("endpoint", "exposed"),
    [
        ("tcp://127.0.0.1:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://10.0.0.7:5557", True),
    ],
)
def test_what_other_machines_may_read_is_known(endpoint: str, exposed: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint).exposed == ([endpoint] if exposed else [])


def test_errors_have_numbers() -> None:
    assert zmq.EADDRINUSE == errno.EADDRINUSE, "or a taken address would end the engine"
