"""An engine whose process another server started and watches."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.engines.client.base import RETRY_AFTER
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.messages import AddRequest, DownMessage, PromptInfo, StepOutputs, StepRecord
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.connection import DoorConnection, HandshakeError, RemoteClock, decode_door
from penstock.engines.door.messages import (
    PROTOCOL_VERSION,
    Farewell,
    Goodbye,
    Hello,
    Leaving,
    LoadedAdapters,
    Ping,
    Pong,
    Welcome,
)
from penstock.engines.door.spec import DoorAddress
from penstock.engines.errors import (
    EngineDeadError,
    EngineError,
    NotReadyError,
    PayloadTooLargeError,
    PermissionDeniedError,
)
from penstock.engines.host.content_digest import ANY_MODEL, ModelDigests
from penstock.engines.host.failure_text import as_load_error
from penstock.engines.process.liveness import Liveness, WatchdogConfig, Watched
from penstock.engines.process.wire import encode

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
"""Seconds between two tries to connect; doubled with each, up to:"""
_LONGEST_PAUSE = 2.0
_QUICKLY, _SURELY = 2.0, 3
"""Who hangs up within so many seconds, so many times in a row, does not just start, hang or die."""
_WELCOME_TIME = 10.0
"""Seconds in which an engine has to answer; its door answers while steps compute."""
_ACKNOWLEDGED = 4 << 20
"""Bytes after which it tells the engine how much it has read, without waiting for the next ping."""


class AttachedEngine(Watched):
    """Implements Engine over the door of an engine process.

    The process is its owner's: this side can neither restart it nor load adapters into it. A connection that ends, by
    whatever side, ends the streams with EngineDeadError; then it connects again, for as long as that takes. So `failed`
    is never true.
    """

    failed = False

    def __init__(
        self,
        door: DoorAddress,
        watchdog: WatchdogConfig | None = None,
        *,
        name: str = "",
        model: ModelDigests = ANY_MODEL,
        policy: str = "",
        on_step: Callable[[StepRecord], None] | None = None,
        on_adapters: Callable[[Sequence[str], int], None] | None = None,
    ) -> None:
        """`name` is what the engine's log calls this side. An engine with another model, or another scheduling policy
        (empty: any), is refused. Of `watchdog`, restarts mean nothing here. `on_adapters` gets the keys of the adapters
        that are loaded, and for how many there is room, whenever that may have changed."""
        super().__init__(watchdog, {}, on_step)
        self._door = door
        self._hello = Hello(PROTOCOL_VERSION, name, model, on_step is not None)
        self._policy = policy
        self._on_adapters = on_adapters
        self._welcome: Welcome | None = None
        """Of the newest connection."""
        self._connection: DoorConnection | None = None
        self._acknowledged = 0
        self._leaving = False
        """The engine is about to go: it takes no new requests."""
        self._clock = RemoteClock()
        self.adapters: tuple[str, ...] = ()
        """Keys of those that its owner has loaded."""

    @property
    def info(self) -> ModelInfo:
        if self._welcome is None:
            raise NotReadyError("The engine has not been reached yet.", retry_after=1)
        return self._welcome.info

    @property
    def fingerprint(self) -> str:
        """Engines with the same one give the same tokens (`registry.engine_fingerprint`). Raises NotReadyError."""
        if self._welcome is None:
            raise NotReadyError("The engine has not been reached yet.", retry_after=1)
        return self._welcome.fingerprint

    @property
    def ready(self) -> bool:
        return self._connection is not None and not self._leaving and self.is_live

    async def start(self) -> None:
        """Waits for the engine, `load_timeout` at most. Raises EngineError."""
        limit = self._watchdog.load_timeout
        try:
            async with asyncio.timeout(limit or None):
                await self._connect_somehow()
        except TimeoutError:
            raise EngineError(f"no engine was at {self._door.address} within {limit:g} s (load-timeout)") from None
        self._supervision = asyncio.create_task(self._supervise())

    async def _connect_somehow(self) -> None:
        """Tries until the engine answers. Raises EngineError when that refuses."""
        pause = _FIRST_PAUSE
        hung_up = 0
        while True:
            tried_at = time.monotonic()
            try:
                return await self._connect()
            except EngineDeadError as error:
                if pause == _FIRST_PAUSE:
                    logger.info("%s: waiting for it", error.message)
                at_once = isinstance(error, HandshakeError) and time.monotonic() - tried_at < _QUICKLY
                hung_up = hung_up + 1 if at_once else 0
                if hung_up == _SURELY:
                    raise EngineError(error.message) from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connect(self) -> None:
        """Raises EngineDeadError while nobody is there, EngineError when it is the wrong engine."""
        connection = DoorConnection(self._door)
        try:
            async with asyncio.timeout(_WELCOME_TIME):
                welcome = await connection.welcome(self._hello)
            if self._policy and welcome.policy != self._policy:
                raise EngineError(f"the engine's policy is {welcome.policy}, not {self._policy}")
        except TimeoutError:
            connection.close()
            raise EngineDeadError(f"what is at {self._door.address} does not answer") from None
        except BaseException:
            connection.close()
            raise
        self._begin(connection, welcome)

    def _begin(self, connection: DoorConnection, welcome: Welcome) -> None:
        before, self._welcome = self._welcome, welcome
        if before is not None and before.fingerprint != welcome.fingerprint:
            logger.warning("the engine at %s has other settings, or another model, than before", self._door.address)
        blocks = welcome.info.num_blocks
        # until it sends its own: perhaps it is the same process, whose counters go on
        self._stats = msgspec.structs.replace(self._stats, num_blocks=blocks, num_free_blocks=blocks)
        self._acknowledged = 0
        self._leaving = False
        self._clock = RemoteClock()
        self.liveness = Liveness(self._watchdog, time.monotonic())
        self._connection = connection
        self._take_adapters(welcome.adapters)
        connection.on_messages(self._receive)
        self._ping()

    def _take_adapters(self, keys: Sequence[str]) -> None:
        self.adapters = tuple(keys)
        if self._on_adapters is not None and self._welcome is not None:
            self._on_adapters(self.adapters, self._welcome.max_adapters)

    def _receive(self, messages: list[bytes]) -> None:
        connection = self._connection
        if connection is None:
            return
        now = time.monotonic()
        self.liveness.heard(now)
        try:
            decoded = [decode_door(message) for message in messages]
        except msgspec.DecodeError as error:  # nothing may be missing from a stream without a word
            connection.end(f"what it sends cannot be read: {error}")
            return
        for message in decoded:
            if isinstance(message, StepOutputs):
                self._take_step(message)
            elif isinstance(message, Pong):
                self._clock.heard(message.sent_at, message.now, now)
                self.liveness.beat(message.beat, now)
            elif isinstance(message, LoadedAdapters):
                self._take_adapters(message.keys)
            elif isinstance(message, Leaving):
                self._leaving = True
            elif isinstance(message, Farewell):
                connection.end(f"it says: {message.error.message}")
        self._streams.call_listeners()
        if connection.read_bytes - self._acknowledged >= _ACKNOWLEDGED:
            self._ping()

    def _take_step(self, result: StepOutputs) -> None:
        for output in result.outputs:
            if output.prompt is not None and output.prompt.chunks:
                output.prompt = self._local_times(output.prompt)
        super()._take_step(result)

    def _local_times(self, prompt: PromptInfo) -> PromptInfo:
        local = self._clock.local
        chunks = [
            msgspec.structs.replace(chunk, scheduled=local(chunk.scheduled), done=local(chunk.done))
            for chunk in prompt.chunks or ()
        ]
        return msgspec.structs.replace(prompt, chunks=chunks)

    async def _supervise(self) -> None:
        """Watches the connection, and makes a new one when it is gone. A reason why not is logged once."""
        last_message = ""
        while True:
            if self._connection is not None:
                self._declare_dead(self._connection, await self._end_of(self._connection))
            try:
                await self._connect_somehow()
                self.num_restarts += 1
                last_message = ""
                logger.warning("the engine at %s is back", self._door.address)
            except EngineError as error:
                if error.message != last_message:
                    logger.error("%s; retrying until it works", error.message)
                last_message = error.message
                await asyncio.sleep(_LONGEST_PAUSE)
            except Exception as error:  # whatever it is, the next try comes
                logger.error("the engine at %s cannot be reached: %s", self._door.address, as_load_error(error).message)
                await asyncio.sleep(_LONGEST_PAUSE)

    async def _end_of(self, connection: DoorConnection) -> str:
        """Pings until the connection ends or the engine hangs; returns why."""
        complaint = await self._until_dead(connection.ended, self._ping)
        return connection.ended.result() if complaint is None else complaint

    @property
    def _beat_interval(self) -> float:
        """Often enough for both sides to know that the other lives."""
        patience = self._welcome.client_timeout if self._welcome is not None else self._watchdog.timeout
        return min(self._watchdog.heartbeat_interval, patience / 4)

    def _ping(self) -> None:
        if self._connection is not None:
            self._acknowledged = self._connection.read_bytes
            self._connection.send([encode(Ping(time.monotonic(), self._acknowledged))])

    def _declare_dead(self, connection: DoorConnection, reason: str) -> None:
        number = len(self._streams)
        logger.error("the engine at %s is gone: %s; %d requests end with an error", self._door.address, reason, number)
        connection.close()
        self._connection = None
        self._stats = self._stats.when_lost()
        self._died()

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """Raises NotReadyError, QueueFullError for an engine that takes nothing in, PayloadTooLargeError for what
        cannot be sent."""
        welcome = self._require_connection()
        if self._leaving:
            raise NotReadyError("The engine is being shut down.", retry_after=RETRY_AFTER)
        self._check_unseen(welcome.most_unseen)
        return self._streams.submit(requests)

    def _require(self) -> None:
        self._require_connection()

    def _require_connection(self) -> Welcome:
        if self._connection is None or self._welcome is None:
            raise NotReadyError("The engine cannot be reached.", retry_after=RETRY_AFTER)
        return self._welcome

    async def load_adapter(self, key: str, folder: Path) -> None:
        """Raises PermissionDeniedError: which adapters an engine has, its owner decides."""
        raise PermissionDeniedError("The adapters of this engine are loaded where it was started.")

    async def unload_adapter(self, key: str) -> None:
        """Raises as `load_adapter`."""
        raise PermissionDeniedError("The adapters of this engine are unloaded where it was started.")

    async def inspect(self, since_steps: Sequence[int] = ()) -> list[EngineView | None]:
        """Raises PermissionDeniedError: what requests of others wait for, its owner sees."""
        raise PermissionDeniedError("This engine is looked at where it was started.")

    def _send(self, messages: Sequence[DownMessage]) -> None:
        """All of them or none. Raises PayloadTooLargeError."""
        if self._connection is None or self._welcome is None:
            return
        now = time.monotonic()
        encoded = [encode(_aged(message, now) if isinstance(message, AddRequest) else message) for message in messages]
        largest = max(map(len, encoded), default=0)
        if largest > self._welcome.max_message_bytes:
            most = self._welcome.max_message_bytes
            raise PayloadTooLargeError(f"The request takes {largest} bytes; this engine takes up to {most}.")
        self._connection.send(encoded)

    async def stop(self, reason: str = "The server was stopped.") -> None:
        """It may be started again."""
        await self._end_supervision()
        connection, self._connection = self._connection, None
        self._stats = self._stats.when_lost()
        self._fail_all(EngineDeadError(reason))
        if connection is not None:
            connection.close(last_words=Goodbye())


def _aged(request: AddRequest, now: float) -> AddRequest:
    """With times as the door takes them: seconds from now."""
    deadline = None if request.deadline is None else request.deadline - now
    return msgspec.structs.replace(request, arrival_time=request.arrival_time - now, deadline=deadline)
