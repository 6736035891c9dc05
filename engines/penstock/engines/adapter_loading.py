"""LoRA adapters on their way into a running engine: read on a thread, installed between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from penstock.engines.bell import Bell
from penstock.engines.contract.messages import AdapterReply, LoadAdapter, UnloadAdapter
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import (
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    PenstockError,
    UnsupportedError,
)
from penstock.engines.scheduler.intake import Intake, wire_error

logger = logging.getLogger(__name__)

_FAREWELL = 2.0
"""Seconds that closing waits for the thread; it may hang in a file system."""


class AdapterLoader:
    """Carries out LoadAdapter and UnloadAdapter on a ModelRunner or a ContinuousBatcher, if that hosts adapters.

    Owned by the engine's loop, which calls `receive` and `advance` between steps. The thread has one adapter at a time:
    the next one is read when that one is installed, so no more than one takes memory beside those that are loaded.
    Requests that name an adapter on its way wait in the intake. Whatever goes wrong is told in the reply, and to these
    requests; the engine works on.
    """

    def __init__(self, engine: object, intake: Intake) -> None:
        """`engine` is a ModelRunner or a ContinuousBatcher."""
        self._host = engine if isinstance(engine, AdapterHost) else None
        self._intake = intake
        self._loads: dict[str, LoadAdapter] = {}
        """By key, in the order of their arrival, until they are installed or given up."""
        self._in_hand: LoadAdapter | None = None
        """The one that the thread has; it may have been given up since."""
        self._replies: list[AdapterReply] = []
        self._orders: SimpleQueue[LoadAdapter | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards the next three: the loader may be closed while the thread works."""
        self._prepared: list[Any] = []
        """What the host has made of the files in hand, or an exception; one at most."""
        self._closed = False
        self._bell = Bell() if self._host is not None else None

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors, one or none, that are readable while `advance` has something to install."""
        return () if self._bell is None else (self._bell.wakeup,)

    def receive(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begins a load, which `advance` brings to its end; unloading is done at once."""
        try:
            if self._host is None:
                raise UnsupportedError("This engine has no LoRA adapters.")
            if isinstance(message, UnloadAdapter):
                if message.key in self._loads:
                    self._give_up(self._loads[message.key], InvalidRequestError("It was unloaded while it loaded."))
                else:
                    self._host.unload_adapter(message.key)
                self._replies.append(AdapterReply(message.call))
            elif message.key in self._loads:
                raise AlreadyExistsError("An adapter with this key is being loaded.")
            else:
                self._loads[message.key] = message
                self._intake.loading_adapters.add(message.key)
        except Exception as error:
            self._replies.append(AdapterReply(message.call, wire_error(_told(error))))

    def advance(self) -> list[AdapterReply]:
        """Installs what is ready and has the next one read. Returns the replies that are due."""
        if self._in_hand is not None and self._fetch():
            self._in_hand = None
        if self._in_hand is None and self._loads:
            self._in_hand = next(iter(self._loads.values()))
            self._orders.put(self._in_hand)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="adapter-loader", daemon=True)
                self._thread.start()
        replies, self._replies = self._replies, []
        return replies

    def _fetch(self) -> bool:
        """Whether the thread is done with what it has in hand, which is then installed, unless it was given up."""
        with self._lock:
            if not self._prepared or self._bell is None:
                return False
            prepared = self._prepared.pop()
            self._bell.silence()
        message = self._in_hand
        if message is None or self._host is None or self._loads.get(message.key) is not message:
            return True
        try:
            if isinstance(prepared, Exception):
                raise prepared
            self._host.install_adapter(message.key, prepared)
        except Exception as error:
            self._give_up(message, _told(error))
        else:
            self._end(message)
            self._replies.append(AdapterReply(message.call))
        return True

    def _give_up(self, message: LoadAdapter, error: PenstockError) -> None:
        self._end(message)
        self._replies.append(AdapterReply(message.call, wire_error(error)))
        waiting = type(error)(f"The request's LoRA adapter could not be loaded: {error.message}")
        self._intake.adapter_failed(message.key, waiting)

    def _end(self, message: LoadAdapter) -> None:
        del self._loads[message.key]
        self._intake.loading_adapters.discard(message.key)

    def _work(self) -> None:
        """The thread."""
        host, bell = self._host, self._bell
        while host is not None and bell is not None and (message := self._orders.get()) is not None:
            try:
                prepared: Any = host.prepare_adapter(message.key, Path(message.folder))
            except Exception as error:
                prepared = error
            with self._lock:
                if self._closed:
                    return
                self._prepared.append(prepared)
                bell.ring()

    def close(self) -> None:
        """What is being read is given up."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._bell is not None:
                self._bell.close()
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(_FAREWELL)


def _told(error: Exception) -> PenstockError:
    """What the client hears of an exception of any kind."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, ValueError | OSError):
        return InvalidRequestError(f"The adapter does not load: {error}")
    logger.error("an adapter failed to load or unload", exc_info=error)
    return EngineError(f"The adapter does not load: {type(error).__name__}: {error}")
