"""The base of the engines of our own: their streams, the calls that they answer, and what a step brings both."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    DownMessage,
    FinishReason,
    Inspect,
    LoadAdapter,
    RequestError,
    RequestOutput,
    ResetPrefixCache,
    StepOutputs,
    StepRecord,
    UnloadAdapter,
)
from penstock.engines.errors import PenstockError, QueueFullError, UnsupportedError, from_code
from penstock.engines.formats.adapter_files import CONFIG_FILE

logger = logging.getLogger(__name__)


class StreamTable:
    """Which stream gets the outputs of which id. An id is known from `submit` until its one terminal output.

    `send` brings messages to the engine.
    """

    def __init__(self, send: Callable[[Sequence[DownMessage]], None]) -> None:
        self._send = send
        self._ids = count(1)
        self._streams: dict[int, RequestStream] = {}
        self._listening: list[RequestStream] = []
        """Streams whose listeners must be called."""
        self.sent = 0
        """Samples that were sent to the engine since it started."""

    def __len__(self) -> int:
        return len(self._streams)

    def new_ids(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        stream = RequestStream((i for request in requests for i in request.ids), self.abort)
        self._send(requests)
        self.sent += len(stream.live_ids)
        stream.arrival_number = self.sent
        self._streams.update((request_id, stream) for request in requests for request_id in request.ids)
        return stream

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """The one loop over a step's outputs. Late outputs of ids that have ended are dropped. Call `call_listeners`
        once for all steps that arrived together: tokens of several steps merge when the gateway is busy."""
        streams, listening = self._streams, self._listening
        for output in outputs:
            stream = streams.get(output.id)
            if stream is not None:
                if stream.add(output):
                    listening.append(stream)
                if output.finish_reason is not None:
                    del streams[output.id]

    def call_listeners(self) -> None:
        listening, self._listening = self._listening, []
        for stream in listening:
            stream.call_listener()

    def abort(self, ids: Iterable[int]) -> None:
        """Ends the streams of these ids at once, and tells the engine which of them were still live."""
        ended = [request_id for request_id in ids if request_id in self._streams]
        for request_id in ended:
            self._streams.pop(request_id).end(request_id, FinishReason.ABORT)
        if ended:
            self._send([AbortRequests(ended)])

    def give_up(self) -> None:
        """Aborts everything in the engine, while the streams still wait for their end."""
        if self._streams:
            self._send([AbortRequests(list(self._streams))])

    def fail_all(self, error: PenstockError) -> None:
        """The engine is gone: ends everything that is live with this error."""
        self.sent = 0
        wire = RequestError.of(error)
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(wire)


RETRY_AFTER = 2.0
"""Seconds told to the clients of an engine that is not there."""

_Message = LoadAdapter | UnloadAdapter | ResetPrefixCache | Inspect


class EngineCalls:
    """Calls that wait for their replies, and the adapters loaded by now. `send` brings messages to the engine."""

    def __init__(self, send: Callable[[Sequence[DownMessage]], None], loaded: Mapping[str, str]) -> None:
        self._send = send
        self._numbers = count(1)
        self._calls: dict[int, tuple[_Message, asyncio.Future[EngineView | None]]] = {}
        self.loaded = dict(loaded)
        """Key -> folder; what a new engine process must have from its start."""

    async def load_adapter(self, key: str, folder: Path) -> None:
        await self._call(LoadAdapter(next(self._numbers), key, str(folder)))

    async def unload_adapter(self, key: str, *, inform: bool = True) -> None:
        """It is gone from `loaded` at once: an engine that starts from now on does not have it.

        `inform`: whether an engine runs that must be informed.
        """
        self.loaded.pop(key, None)
        if inform:
            await self._call(UnloadAdapter(next(self._numbers), key))

    async def reset_prefix_cache(self) -> None:
        await self._call(ResetPrefixCache(next(self._numbers)))

    async def inspect(self, since_step: int) -> EngineView:
        view = await self._call(Inspect(next(self._numbers), since_step))
        if view is None:
            raise UnsupportedError("This engine shows nothing of itself.")
        return view

    async def _call(self, message: _Message) -> EngineView | None:
        done: asyncio.Future[EngineView | None] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = message, done
        self._send([message])
        return await done

    def deliver(self, replies: Iterable[CallReply]) -> None:
        """Replies to calls that are not known any more are dropped."""
        for reply in replies:
            message, done = self._calls.pop(reply.call, (None, None))
            if message is None or done is None:
                continue
            if reply.error is not None:
                if not done.done():
                    done.set_exception(from_code(reply.error.code, reply.error.message))
                continue
            if not done.done():
                done.set_result(reply.view)
                if isinstance(message, LoadAdapter):
                    self.loaded[message.key] = message.folder
            elif isinstance(message, LoadAdapter):  # its caller has gone and would never unload it
                self._send([UnloadAdapter(next(self._numbers), message.key)])

    def fail_all(self, error: PenstockError) -> None:
        """Ends the calls that wait with this error."""
        calls, self._calls = self._calls, {}
        for _, done in calls.values():
            if not done.done():
                done.set_exception(error)

    def drop_missing(self) -> None:
        """Gives up adapters whose files are gone: an engine that starts again without them is better than none."""
        for key, folder in list(self.loaded.items()):
            if not (Path(folder) / CONFIG_FILE).is_file():
                logger.error("the adapter %s has no files any more: the engine starts without it", key)
                del self.loaded[key]

    def forget(self, keys: Iterable[str]) -> None:
        """Unloads those of a new engine process's adapters that were unloaded while it started."""
        self._send([UnloadAdapter(next(self._numbers), key) for key in keys if key not in self.loaded])


class EngineClient(ABC):
    """What implementations of Engine have in common. They bring messages to the engine (`_send`) and its answers back
    (`_take_step`, then `call_listeners` of the streams), and say why it takes nothing (`_require`)."""

    def __init__(self, loaded: Mapping[str, str], on_step: Callable[[StepRecord], None] | None = None) -> None:
        """`loaded`: folders of the adapters that are there from the start, by key."""
        self._streams = StreamTable(self._send)
        self._calls = EngineCalls(self._send, loaded)
        self._stats = EngineStats()
        self._on_step = on_step

    @abstractmethod
    def _send(self, messages: Sequence[DownMessage]) -> None: ...

    @abstractmethod
    def _require(self) -> None:
        """Raises NotReadyError while the engine is not there."""

    @property
    def stats(self) -> EngineStats:
        return self._stats

    def new_ids(self, count: int) -> tuple[int, ...]:
        return self._streams.new_ids(count)

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """Raises NotReadyError."""
        self._require()
        return self._streams.submit(requests)

    def _check_unseen(self, most: int) -> None:
        """Raises QueueFullError while the engine has more than so many samples to take in."""
        unseen = self._streams.sent - self._stats.own_admitted
        if unseen > most:
            raise QueueFullError(f"{unseen} requests wait for the engine to take them in.", retry_after=RETRY_AFTER)

    def abort(self, ids: Sequence[int]) -> None:
        self._streams.abort(ids)

    async def load_adapter(self, key: str, folder: Path) -> None:
        self._require()
        await self._calls.load_adapter(key, folder)

    async def unload_adapter(self, key: str) -> None:
        self._require()
        await self._calls.unload_adapter(key)

    async def reset_prefix_cache(self) -> None:
        self._require()
        await self._calls.reset_prefix_cache()

    async def inspect(self, since_steps: Sequence[int] = ()) -> list[EngineView | None]:
        self._require()
        return [await self._calls.inspect(next(iter(since_steps), 0))]

    def _take_step(self, result: StepOutputs) -> None:
        self._stats = result.stats
        if self._on_step is not None:
            for step in result.steps:
                self._on_step(step)
        self._calls.deliver(result.replies)
        self._streams.deliver(result.outputs)

    def _fail_all(self, error: PenstockError) -> None:
        """Ends all streams and calls."""
        self._streams.fail_all(error)
        self._calls.fail_all(error)
