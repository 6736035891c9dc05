"""LoRA adapters on their way into a running engine: read on a thread, installed between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engines.bell import Bell
from penstock.engines.contract.messages import CallReply, LoadAdapter, RequestError, UnloadAdapter
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import (
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    PenstockError,
    UnsupportedError,
)
from penstock.engines.host.failure_text import as_load_error, one_line
from penstock.engines.scheduler.intake import Intake

logger = logging.getLogger(__name__)

_FAREWELL = 2.0
"""Seconds that closing waits for the thread; it may hang in a file system."""
_LONGEST_READING = 600.0
"""Seconds after which an adapter is given up that is not read: its files hang."""


@dataclass(eq=False)
class _Reading:
    """A load that a thread of its own is at."""

    message: LoadAdapter
    give_up_at: float
    thread: threading.Thread | None = None
    prepared: Any = None
    """What the host has made of the files, or an exception."""
    is_done: bool = False


def adapter_loader(engine: object, intake: Intake, clock: Callable[[], float]) -> AdapterLoader | NoAdapters:
    """Of a ModelRunner or a ContinuousBatcher, which may host adapters."""
    return AdapterLoader(engine, intake, clock) if isinstance(engine, AdapterHost) else NoAdapters()


class NoAdapters:
    """Stands where an AdapterLoader would if the engine hosted adapters."""

    wakeups: Sequence[int] = ()
    next_look = None

    def __init__(self) -> None:
        self._replies: list[CallReply] = []

    def receive(self, message: LoadAdapter | UnloadAdapter) -> None:
        error = RequestError.of(UnsupportedError("This engine has no LoRA adapters."))
        self._replies.append(CallReply(message.call, error))

    def advance(self) -> list[CallReply]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        pass


class AdapterLoader:
    """Carries out LoadAdapter and UnloadAdapter on an engine that hosts adapters.

    Owned by the engine's loop, which calls `receive` and `advance` between steps. One adapter is read at a time: the
    next one when that one is installed, so no more than one takes memory beside those that are loaded. The thread of
    one that was given up is left to itself: it may hang in a file system, and nothing waits for it. Requests that name
    an adapter on its way wait in the intake. Whatever goes wrong is told in the reply, and to these requests; the
    engine works on.
    """

    def __init__(self, host: AdapterHost, intake: Intake, clock: Callable[[], float]) -> None:
        self._host = host
        self._intake = intake
        self._clock = clock
        self._loads: dict[str, LoadAdapter] = {}
        """By key, in the order of their arrival, until they are installed or given up."""
        self._replies: list[CallReply] = []
        self._lock = threading.Lock()
        """Guards the next two: threads look at them when they are done."""
        self._reading: _Reading | None = None
        """Of the first of `_loads`."""
        self._bell = Bell()

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to install."""
        return (self._bell.wakeup,)

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`."""
        return None if self._reading is None else self._reading.give_up_at

    def receive(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begins a load, which `advance` brings to its end; unloading is done at once."""
        try:
            if isinstance(message, UnloadAdapter):
                if message.key in self._loads:
                    unloaded = InvalidRequestError("The adapter was unloaded before it had loaded.")
                    self._give_up(self._loads[message.key], unloaded)
                else:
                    self._host.unload_adapter(message.key)
                self._replies.append(CallReply(message.call))
            elif message.key in self._loads:
                raise AlreadyExistsError("An adapter with this key is being loaded.")
            else:
                self._loads[message.key] = message
                self._intake.loading_adapters.add(message.key)
        except Exception as error:
            self._replies.append(CallReply(message.call, RequestError.of(_told(error))))

    def advance(self) -> list[CallReply]:
        """Installs what is ready and has the next one read. Returns the replies that are due."""
        reading = self._reading
        if reading is not None:
            if reading.is_done:
                self._install(reading)
            elif self._clock() >= reading.give_up_at:
                logger.error("the adapter %s in %s is given up", reading.message.key, reading.message.folder)
                self._give_up(reading.message, EngineError(f"Its files were not read within {_LONGEST_READING:g} s."))
        if self._reading is None and self._loads:
            self._read(next(iter(self._loads.values())))
        replies, self._replies = self._replies, []
        return replies

    def _read(self, message: LoadAdapter) -> None:
        """Begins to."""
        reading = self._reading = _Reading(message, self._clock() + _LONGEST_READING)
        reading.thread = threading.Thread(target=self._work, args=(reading,), name="adapter-loader", daemon=True)
        reading.thread.start()

    def _install(self, reading: _Reading) -> None:
        message = reading.message
        try:
            if isinstance(reading.prepared, Exception):
                raise reading.prepared
            self._host.install_adapter(message.key, reading.prepared)
        except Exception as error:
            self._give_up(message, _told(error))
        else:
            self._end(message)
            self._replies.append(CallReply(message.call))

    def _give_up(self, message: LoadAdapter, error: PenstockError) -> None:
        self._end(message)
        self._replies.append(CallReply(message.call, RequestError.of(error)))
        waiting = type(error)(f"The request's LoRA adapter could not be loaded: {error.message}")
        self._intake.adapter_failed(message.key, waiting)

    def _end(self, message: LoadAdapter) -> None:
        del self._loads[message.key]
        self._intake.loading_adapters.discard(message.key)
        with self._lock:
            if self._reading is not None and self._reading.message is message:
                self._reading = None
                self._bell.silence()

    def _work(self, reading: _Reading) -> None:
        """The thread."""
        try:
            prepared: Any = self._host.prepare_adapter(reading.message.key, Path(reading.message.folder))
        except Exception as error:
            prepared = error
        with self._lock:
            if self._reading is reading:
                reading.prepared, reading.is_done = prepared, True
                self._bell.ring()

    def close(self) -> None:
        """What is being read is given up."""
        with self._lock:
            reading, self._reading = self._reading, None
            self._bell.close()
        if reading is not None and reading.thread is not None:
            reading.thread.join(_FAREWELL)


def _told(error: Exception) -> PenstockError:
    """What the client hears of an exception of any kind."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, ValueError | OSError):
        return InvalidRequestError(f"The adapter does not load: {one_line(str(error))}")
    return EngineError(f"The adapter does not load: {as_load_error(error).message}")
