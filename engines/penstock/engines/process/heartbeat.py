"""Heartbeats: a thread of the engine process reports how long the work under way has taken.

They have a pipe of their own, since a ZeroMQ socket belongs to the thread that steps. Each fits into an atomic write
(pipe(7), PIPE_BUF); if they are not read for half an hour the pipe is full, and those that do not fit are dropped.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO

import msgspec

from penstock.engines.contract.core import Core
from penstock.engines.contract.messages import Heartbeat

_MOST_BYTES = 1 << 16
"""Of one read; where pages are large a pipe holds more (pipe(7))."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Heartbeat).decode


class HeartbeatThread:
    """The engine process's end. Native code that does not release the interpreter's lock stops it, like everything in
    this process: the gateway takes that for silence."""

    def __init__(self, pipe: int, interval: float, clock: Callable[[], float]) -> None:
        """`interval` in seconds. `core` is set once there is one."""
        self.core: Core | None = None
        self._pipe = pipe
        self._interval = interval
        self._clock = clock
        self._step_began: float | None = None
        self._expected_seconds: float | None = None
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step_begins(self) -> None:
        self._step_began = self._clock()

    def step_ends(self) -> None:
        self._step_began = None

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                with suppress(BlockingIOError):  # left out where the pipe is full
                    os.write(self._pipe, _encode(self.now()) + b"\n")
            except OSError:  # the gateway is gone, and so is this process in a moment
                return
            pause.wait(self._interval)

    def now(self) -> Heartbeat:
        """The heartbeat of this moment. Called by any thread."""
        core, began = self.core, self._step_began
        now = self._clock()
        quiet = core.quiet_since if core is not None else None
        since = min(now if began is None else began, now if quiet is None else quiet)
        if core is not None:
            with suppress(RuntimeError):  # the steps under way changed while they were counted: as it was before
                self._expected_seconds = core.expected_seconds
        return Heartbeat(now - since, self._expected_seconds)


class HeartbeatPipe:
    """The gateway's end, on its event loop."""

    def __init__(self, pipe: FileIO, on_beat: Callable[[Heartbeat], None]) -> None:
        """It closes `pipe`. `on_beat` gets the newest of those that have come."""
        self._loop = asyncio.get_running_loop()
        self._on_beat = on_beat
        self._begun = b""
        """What has come of a heartbeat whose end has not."""
        self._pipe = pipe
        self._loop.add_reader(self._pipe, self._read)

    def _read(self) -> None:
        data = self._pipe.read(_MOST_BYTES)
        if not data:
            self._loop.remove_reader(self._pipe)
            return
        *beats, self._begun = (self._begun + data).split(b"\n")
        if beats:
            self._on_beat(_decode(beats[-1]))

    def close(self) -> None:
        self._loop.remove_reader(self._pipe)
        self._pipe.close()
