"""Engines behind a door: clients without manners, and the conformance suite's driver through an AttachedEngine."""

from __future__ import annotations

import asyncio
import select
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import zmq

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    DownMessage,
    Heartbeat,
    RequestOutput,
    StepOutputs,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.core import EngineCore
from penstock.engines.door.attached import AttachedEngine
from penstock.engines.door.connection import decode_door
from penstock.engines.door.door import Door
from penstock.engines.door.messages import PROTOCOL_VERSION, Hello, Welcome
from penstock.engines.door.sockets import client_socket
from penstock.engines.door.spec import DoorAddress, DoorSpec
from penstock.kvcache import KVGroup
from support.engine import Driver

M = TypeVar("M")

INFO = ModelInfo(
    vocab_size=384,
    max_model_len=512,
    kv_groups=(KVGroup(16),),
    num_blocks=64,
    eos_token_ids=(),
    runner="none",
)


@contextmanager
def open_door(info: ModelInfo = INFO, adapters: Iterable[str] = (), **spec: Any) -> Iterator[Door]:
    """A door whose loop is the test. `spec` may name an address."""
    with tempfile.TemporaryDirectory(prefix="door-") as folder:
        settings = DoorSpec(**{"address": f"ipc://{folder}/door", **spec})
        welcome = Welcome(info, "print", [], 0, "fcfs", 10_000, settings.max_message_bytes, settings.client_timeout)
        door = Door(settings, welcome, adapters, lambda: Heartbeat(0.0, None))
        try:
            yield door
        finally:
            door.close("the test is over")


def taken(door: Door, seconds: float = 10.0) -> list[DownMessage]:
    """What the engine finds next, waited for; nothing within `seconds` is an empty list."""
    select.select([door.wakeup], [], [], seconds)
    return list(door.with_clients(()))


class RawClient:
    """Says what it likes, in bytes or as messages."""

    def __init__(self, address: str, key: str = "", options: Mapping[int, bytes] | None = None) -> None:
        self._context = zmq.Context()
        self.socket = client_socket(self._context, DoorAddress(address, key))
        for option, value in (options or {}).items():
            self.socket.setsockopt(option, value)
        self.socket.connect(address)

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def tell(self, message: Any) -> None:
        self.say(msgspec.msgpack.encode(message))

    def hear(self, kind: type[M], seconds: float = 10.0) -> M:
        """The next message of this kind; others are passed over."""
        ends = time.monotonic() + seconds
        while self.socket.poll(max(0.0, ends - time.monotonic()) * 1e3):
            message = decode_door(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} has come")

    def hello(self, **fields: Any) -> Welcome:
        self.tell(Hello(PROTOCOL_VERSION, **fields))
        return self.hear(Welcome)

    def close(self) -> None:
        self._context.destroy(linger=0)


class _Counting(AttachedEngine):
    num_outputs = 0

    def _take_step(self, result: StepOutputs) -> None:
        super()._take_step(result)
        self.num_outputs += len(result.outputs)


class CoreBehindDoor:
    """A core as a client of a door sees it: messages go in, and outputs come out, through an AttachedEngine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._folder = tempfile.TemporaryDirectory(prefix="door-")
        address = f"ipc://{self._folder.name}/door"
        spec = DoorSpec(address=address, client_timeout=600.0)
        welcome = Welcome(core.info, "print", [], 0, "fcfs", 1 << 20, spec.max_message_bytes, spec.client_timeout)
        self._door = Door(spec, welcome, (), lambda: Heartbeat(0.0, None), lambda: core._clock())
        self._loop = asyncio.new_event_loop()
        self._engine = _Counting(DoorAddress(address))
        self._loop.run_until_complete(self._engine.start())
        self._streams: dict[RequestStream, dict[int, int]] = {}
        """With the ids that the driver gave, by those of the engine."""
        self._ids: dict[int, int] = {}
        self._num_outputs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def step(self, messages: Sequence[DownMessage]) -> StepOutputs:
        arrived: list[DownMessage] = []
        expected = self._loop.run_until_complete(self._told(messages))
        while len(arrived) < expected:
            arrived += taken(self._door)
        result = self.core.step(arrived)
        self._num_outputs += len(result.outputs)
        self._door.deliver(result)
        outputs = self._loop.run_until_complete(self._heard())
        return StepOutputs(outputs, result.stats, result.steps, result.replies)

    async def _told(self, messages: Sequence[DownMessage]) -> int:
        """How many of the messages reach the engine."""
        expected = 0
        for message in messages:
            if isinstance(message, AddRequest):
                ids = self._engine.new_ids(len(message.ids))
                own = msgspec.structs.replace(message, ids=ids, arrival_time=time.monotonic())
                self._streams[self._engine.submit([own])] = dict(zip(ids, message.ids, strict=True))
                self._ids.update(zip(message.ids, ids, strict=True))
                expected += 1
            elif isinstance(message, AbortRequests):
                ids_of = [self._ids[each] for each in message.ids]
                expected += any(each in stream.live_ids for stream in self._streams for each in ids_of)
                self._engine.abort(ids_of)
        return expected

    async def _heard(self) -> list[RequestOutput]:
        async with asyncio.timeout(10):
            while self._engine.num_outputs < self._num_outputs:
                await asyncio.sleep(0)
        found = []
        for stream, names in self._streams.items():
            for output in stream.take():
                output.id = names[output.id]
                found.append(output)
        return found

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()
        self._door.close("the test is over")
        self._folder.cleanup()


class AttachedDriver(Driver):
    core: Any

    def __init__(self, engine: ModelRunner, **scheduler: Any) -> None:
        super().__init__(engine, **scheduler)
        assert isinstance(self.core, EngineCore)
        self.core = CoreBehindDoor(self.core)


def idle(stats: Callable[[], EngineStats]) -> bool:
    """Whether an engine holds nothing, as far as its clients know."""
    now = stats()
    return now.num_blocks > 0 and now.num_free_blocks == now.num_blocks and not now.num_running and not now.num_waiting
