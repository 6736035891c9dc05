"""LoRA adapters on their way into a running engine: read on a thread, installed between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.engines.contract.engine_view import WaitsFor
from penstock.engines.contract.messages import AddRequest, CallReply, LoadAdapter, RequestError, UnloadAdapter
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import (
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    PenstockError,
    UnsupportedError,
)
from penstock.engines.host.failure_text import as_load_error, one_line
from penstock.engines.inbox import Bell
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import Pending

logger = logging.getLogger(__name__)

_FAREWELL = 2.0
"""Seconds that closing waits for the thread; it may hang in a file system."""
_LONGEST_READING = 600.0
"""Seconds after which an adapter is given up that is not read: its files hang."""


@dataclass(eq=False)
class _Load:
    """An adapter on its way, until it is installed or given up (`Pending`)."""

    reason: ClassVar[str] = WaitsFor.ADAPTER
    message: LoadAdapter
    is_pending: bool = True
    error: PenstockError | None = None
    """What requests get that wait for it."""


@dataclass(eq=False)
class _Reading:
    """A load that a thread of its own is at."""

    load: _Load
    give_up_at: float
    thread: threading.Thread | None = None
    prepared: Any = None
    """What the host has made of the files, or an exception."""
    is_done: bool = False


def adapter_loader(engine: object, intake: QueueIntake, clock: Callable[[], float]) -> AdapterLoader | NoAdapters:
    """Of a ModelRunner or a ContinuousBatcher, which may host adapters."""
    return AdapterLoader(engine, intake, clock) if isinstance(engine, AdapterHost) else NoAdapters()


class NoAdapters:
    """Stands where an AdapterLoader would if the engine hosted adapters."""

    under_way: Collection[object] = ()
    wakeups: Sequence[int] = ()
    next_look = None

    def receive(self, message: LoadAdapter | UnloadAdapter) -> list[CallReply]:
        error = RequestError.of(UnsupportedError("This engine has no LoRA adapters."))
        return [CallReply(message.call, error)]

    def needs_of(self, message: AddRequest) -> Sequence[Pending]:
        return ()

    def advance(self) -> list[CallReply]:
        return []

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

    def __init__(self, host: AdapterHost, intake: QueueIntake, clock: Callable[[], float]) -> None:
        self._host = host
        self._intake = intake
        self._clock = clock
        self.under_way: dict[str, _Load] = {}
        """By key, in the order of their arrival, until they are installed or given up."""
        self._replies: list[CallReply] = []
        self._lock = threading.Lock()
        """Guards the next two: threads look at them when they are done."""
        self._reading: _Reading | None = None
        """Of the first of `under_way`."""
        self._bell = Bell()

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to install."""
        return (self._bell.wakeup,)

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`."""
        return None if self._reading is None else self._reading.give_up_at

    def needs_of(self, message: AddRequest) -> Sequence[Pending]:
        """The adapter that the request waits for, if it is on its way."""
        load = self.under_way.get(message.adapter)
        return () if load is None else (load,)

    def receive(self, message: LoadAdapter | UnloadAdapter) -> list[CallReply]:
        """Begins a load, which `advance` brings to its end; unloading is done at once. Returns the replies that are
        due."""
        try:
            if isinstance(message, UnloadAdapter):
                if message.key in self.under_way:
                    unloaded = InvalidRequestError("The adapter was unloaded before it had loaded.")
                    self._give_up(self.under_way[message.key], unloaded)
                else:
                    self._host.unload_adapter(message.key)
                self._replies.append(CallReply(message.call))
            elif message.key in self.under_way:
                raise AlreadyExistsError("An adapter with this key is being loaded.")
            else:
                self.under_way[message.key] = load = _Load(message)
                if self._reading is None:
                    self._read(load)
        except Exception as error:
            self._replies.append(CallReply(message.call, RequestError.of(_as_error(error))))
        return self._take_replies()

    def advance(self) -> list[CallReply]:
        """Installs what is ready and has the next one read. Returns the replies that are due."""
        reading = self._reading
        if reading is not None:
            message = reading.load.message
            if reading.is_done:
                self._install(reading)
            elif self._clock() >= reading.give_up_at:
                logger.error("the adapter %s in %s is given up", message.key, message.folder)
                self._give_up(reading.load, EngineError(f"Its files were not read within {_LONGEST_READING:g} s."))
        if self._reading is None and self.under_way:
            self._read(next(iter(self.under_way.values())))
        return self._take_replies()

    def _take_replies(self) -> list[CallReply]:
        replies, self._replies = self._replies, []
        return replies

    def _read(self, load: _Load) -> None:
        """Begins to."""
        reading = self._reading = _Reading(load, self._clock() + _LONGEST_READING)
        reading.thread = threading.Thread(target=self._work, args=(reading,), name="adapter-loader", daemon=True)
        reading.thread.start()

    def _install(self, reading: _Reading) -> None:
        load, message = reading.load, reading.load.message
        try:
            if isinstance(reading.prepared, Exception):
                raise reading.prepared
            self._host.install_adapter(message.key, reading.prepared)
        except Exception as error:
            self._give_up(load, _as_error(error))
        else:
            self._end(load)
            self._replies.append(CallReply(message.call))

    def _give_up(self, load: _Load, error: PenstockError) -> None:
        load.error = type(error)(f"The request's LoRA adapter could not be loaded: {error.message}")
        self._end(load)
        self._intake.failed(load)
        self._replies.append(CallReply(load.message.call, RequestError.of(error)))

    def _end(self, load: _Load) -> None:
        load.is_pending = False
        del self.under_way[load.message.key]
        with self._lock:
            if self._reading is not None and self._reading.load is load:
                self._reading = None
                self._bell.silence()

    def _work(self, reading: _Reading) -> None:
        """The thread."""
        try:
            prepared: Any = self._host.prepare_adapter(reading.load.message.key, Path(reading.load.message.folder))
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


def _as_error(error: Exception) -> PenstockError:
    """What the client hears of an exception of any kind."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, ValueError | OSError):
        return InvalidRequestError(f"The adapter does not load: {one_line(str(error))}")
    return EngineError(f"The adapter does not load: {as_load_error(error).message}")
