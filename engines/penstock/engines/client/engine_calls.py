"""The gateway's side of messages that the engine answers once; shared by all engines of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from penstock.engines.contract.messages import CallReply, DownMessage, LoadAdapter, ResetPrefixCache, UnloadAdapter
from penstock.engines.errors import PenstockError, from_code
from penstock.engines.formats.adapter_files import CONFIG_FILE

logger = logging.getLogger(__name__)

_Message = LoadAdapter | UnloadAdapter | ResetPrefixCache


class EngineCalls:
    """Calls that wait for their replies, and the adapters loaded by now. `send` brings messages to the engine."""

    def __init__(self, send: Callable[[Sequence[DownMessage]], None], loaded: Mapping[str, str]) -> None:
        self._send = send
        self._numbers = count(1)
        self._calls: dict[int, tuple[_Message, asyncio.Future[None]]] = {}
        self.loaded = dict(loaded)
        """Key -> folder; what a new engine process must have from its start."""

    async def load_adapter(self, key: str, folder: Path) -> None:
        await self._call(LoadAdapter(next(self._numbers), key, str(folder)))

    async def unload_adapter(self, key: str, *, told: bool = True) -> None:
        """It is gone from `loaded` at once: an engine that starts from now on does not have it.

        `told`: whether an engine runs that must be informed.
        """
        self.loaded.pop(key, None)
        if told:
            await self._call(UnloadAdapter(next(self._numbers), key))

    async def reset_prefix_cache(self) -> None:
        await self._call(ResetPrefixCache(next(self._numbers)))

    async def _call(self, message: _Message) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = message, done
        self._send([message])
        await done

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
                done.set_result(None)
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

    def forget(self, given: Iterable[str]) -> None:
        """Unloads those of a new engine process's adapters that were unloaded while it started."""
        self._send([UnloadAdapter(next(self._numbers), key) for key in given if key not in self.loaded])
