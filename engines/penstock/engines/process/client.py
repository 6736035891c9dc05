"""The gateway's side of the process border: starts the engine process, watches it, and replaces it when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.engines.client.base import RETRY_AFTER
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.loading import Loading, LoadingEnds, silent
from penstock.engines.contract.messages import (
    AddRequest,
    CloseDoor,
    DownMessage,
    LoadFailed,
    Ready,
    StepRecord,
    UpMessage,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.spec import DoorAddress
from penstock.engines.errors import EngineDeadError, EngineError, NoResourcesError, NotReadyError
from penstock.engines.host.black_box import dump_stacks
from penstock.engines.host.crash_folder import Crash, keep_evidence, signal_name
from penstock.engines.host.failure_text import as_load_error
from penstock.engines.offload import CLOSING_SECONDS
from penstock.engines.process.link import EngineLink
from penstock.engines.process.liveness import Liveness, WatchdogConfig, Watched
from penstock.engines.process.worker_process import WorkerProcess, new_worker
from penstock.engines.registry import EngineSpec, Order

logger = logging.getLogger(__name__)


_LAST_MESSAGE_SECONDS = 0.5
"""Seconds to wait for the message of a process that has already ended."""
_ENDING_SECONDS = 5.0
"""Seconds that a process has to end when it is told to."""
_GRACE = 1.0
"""Seconds for those that end with the process: among them is Python's resource tracker, which removes shared memory."""
_LOOK = 0.02
_BACKOFF = 1.0
"""Seconds of delay added with each recent restart; the first comes at once."""
_LONGEST_BACKOFF = 30.0
"""Seconds between two tries while the system lacks what a process needs."""
_DUMP_SECONDS = 0.1
"""Seconds that a process which hangs gets to write its stacks."""


class ProcessEngine(Watched):
    """Implements Engine with an engine process. When that dies or hangs, its streams end with EngineDeadError, and a
    new process replaces it. Each has a socket of its own, so late messages of the old one cannot arrive."""

    def __init__(
        self,
        spec: EngineSpec,
        watchdog: WatchdogConfig | None = None,
        *,
        log_level: str = "INFO",
        on_step: Callable[[StepRecord], None] | None = None,
        on_loading: LoadingEnds = silent,
        name: str = "",
        crash_folder: Path | None = None,
    ) -> None:
        """`name`: the model's. `crash_folder`: where it is kept what is known of a process that dies; None: nowhere."""
        super().__init__(watchdog, spec.options.get("adapters", {}), on_step)
        self._spec = spec
        self._log_level = log_level
        self._on_loading = on_loading
        self._name = name
        self._crash_folder = crash_folder
        self._info: ModelInfo | None = None
        self._link: EngineLink | None = None
        self._process: WorkerProcess | None = None
        self._up_since = 0.0
        self._seconds_up = 0.0
        """Of all processes together, but for the one that is up now: its time is added at its end."""
        self._idle: asyncio.Future[None] | None = None
        """Set while a drain waits for the engine to have no more work."""
        self._door_closed = False
        """The engine process has confirmed it (`drain`)."""
        self._restarts: deque[float] = deque()
        """When the recent ones happened, in `_seconds_up`."""

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise NotReadyError("The model is still loading.", retry_after=1)
        return self._info

    @property
    def ready(self) -> bool:
        return self._link is not None and self.is_live

    @property
    def failed(self) -> bool:
        return self._supervision is not None and self._supervision.done()

    @property
    def door(self) -> DoorAddress | None:
        """Where others can use this engine."""
        door = self._spec.door
        return None if door is None else DoorAddress(door.address, door.key)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        if self._info is not None:  # it was stopped: as after a restart, adapters may have gone meanwhile
            self._calls.drop_missing()
        await self._spawn()
        self._supervision = asyncio.create_task(self._supervise())

    async def _spawn(self) -> None:
        """Starts a process and waits until its model is loaded. Raises EngineError when that fails."""
        adapters = dict(self._calls.loaded)
        self.liveness = Liveness(self._watchdog, time.monotonic())
        try:
            # For this user alone (0700). Once the two are connected it is not needed any more, so killing this process
            # leaves nothing behind.
            with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder:
                link, self._info = await self._connected(f"ipc://{folder}/0", adapters)
        except OSError as error:  # no memory, no process table entry, no folder, ...
            raise NoResourcesError(f"the engine process cannot be started: {error}") from error
        num_blocks = self._info.num_blocks
        self._stats = EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)  # until it sends its own
        self._up_since = time.monotonic()
        self.liveness.heard(self._up_since)
        self._link = link
        link.on_messages(self._receive)
        self._calls.forget(adapters)

    async def _connected(self, address: str, adapters: dict[str, str]) -> tuple[EngineLink, ModelInfo]:
        self._process = process = new_worker(self._spec.runner)
        link = None
        try:
            link = EngineLink(address, process.heartbeats, lambda beat: self.liveness.beat(beat, time.monotonic()))
            order = Order(address, self._log_level, self._spec_with(adapters))
            await process.order(msgspec.json.encode(order) + b"\n")
            return link, await self._loaded(link, process)
        except BaseException:
            if link is not None:
                link.close()
            await self._kill()
            raise

    def _spec_with(self, adapters: dict[str, str]) -> EngineSpec:
        """For a new process, with the adapters that are loaded now. Engines without adapters do not know the option."""
        options = self._spec.options
        if adapters or "adapters" in options:
            options = options | {"adapters": adapters}
        interval = self._watchdog.heartbeat_interval
        return msgspec.structs.replace(self._spec, options=options, heartbeat_interval=interval)

    async def _loaded(self, link: EngineLink, process: WorkerProcess) -> ModelInfo:
        """Waits until the model is loaded. Raises EngineError if loading fails, the process ends or takes too long."""
        first = asyncio.ensure_future(self._first_result(link))
        ended = asyncio.ensure_future(process.wait())
        try:
            limit = self._watchdog.load_timeout
            await asyncio.wait((first, ended), timeout=limit or None, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():  # its last words may still be on their way through the socket
                await asyncio.wait((first,), timeout=_LAST_MESSAGE_SECONDS)
            if not first.done():
                reason = (
                    f"the engine process ended while it loaded the model ({how_it_ended(process.returncode)})"
                    if ended.done()
                    else f"the model was not loaded within {limit:g} s (load-timeout); the last sign of life of its "
                    f"process came {self.liveness.silence(time.monotonic()):.1f} s ago"
                )
                await self._keep_evidence(process, reason)
                raise EngineError(reason)
            message = first.result()
        finally:
            first.cancel()
            ended.cancel()
            self._on_loading(None)
        if isinstance(message, Ready):
            return message.info
        if isinstance(message, LoadFailed):
            raise EngineError(message.message)
        raise EngineError("the engine process sent an unexpected first message")

    async def _first_result(self, link: EngineLink) -> UpMessage:
        while isinstance(message := await link.first_message(), Loading):
            self._on_loading(message)
        return message

    def _receive(self, messages: list[bytes]) -> None:
        link = self._link
        if link is None:
            return
        self.liveness.heard(time.monotonic())
        for result in link.decode_steps(messages):
            self._take_step(result)
            if self._idle is not None:
                self._door_closed |= any(reply.call == CloseDoor.call for reply in result.replies)
                if self._door_closed and not result.stats.num_running and not result.stats.num_waiting:
                    self._end_drain()
        self._streams.call_listeners()

    def _end_drain(self) -> None:
        """The engine works for nobody, or is gone."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _supervise(self) -> None:
        """Watches the process, and replaces it when it is dead; gives up when it dies too often. Where the system has
        no resources for a new one, tries until it has: that is not the engine's fault."""
        refusals = 0
        while True:
            if self._link is not None and self._process is not None:
                reason = await self._end_of(self._process)
                self._declare_dead(self._link, reason)
                await self._keep_evidence(self._process, reason)
            await self._kill()
            if not self._may_restart():
                logger.critical("the engine died %d times; it stays down", len(self._restarts) + 1)
                return
            self.num_restarts += 1
            try:
                await asyncio.sleep(_BACKOFF * (len(self._restarts) - 1))
                self._calls.drop_missing()
                await self._spawn()
                refusals = 0
                logger.warning("the engine is back (restart %d)", self.num_restarts)
            except NoResourcesError as error:
                logger.error("the engine could not be restarted, and will be retried: %s", error.message)
                self._restarts.pop()
                refusals += 1
                await asyncio.sleep(min(_BACKOFF * refusals, _LONGEST_BACKOFF))
            except EngineError as error:
                logger.error("the engine could not be restarted: %s", error.message)
            except Exception as error:  # whatever it is, the next try comes
                logger.error("the engine could not be restarted: %s", as_load_error(error).message)

    async def _end_of(self, process: WorkerProcess) -> str:
        """Waits until the process is dead, or counts as that; returns why."""
        ended = asyncio.ensure_future(process.wait())
        try:
            complaint = await self._until_dead(ended)
            if complaint is not None:
                return complaint
            if (process.returncode or 0) > 0 and len(self._streams):
                # it has ended itself; its last message, which names the failed requests, may be unread
                await asyncio.sleep(_LAST_MESSAGE_SECONDS)
            return f"its process ended ({how_it_ended(process.returncode)})"
        finally:
            ended.cancel()

    def _declare_dead(self, link: EngineLink, reason: str) -> None:
        logger.error("the engine is dead: %s; %d requests end with an error", reason, len(self._streams))
        link.close()
        self._link = None
        self._seconds_up += time.monotonic() - self._up_since
        self._stats = EngineStats()  # what it held is gone with it
        self._end_drain()
        self._died()

    async def _keep_evidence(self, process: WorkerProcess, reason: str) -> None:
        """Before the process is replaced, and, where it hangs, before it is killed."""
        if process.returncode is None:
            dump_stacks(process.pid)
            await asyncio.sleep(_DUMP_SECONDS)
        settings = msgspec.to_builtins(self._spec)
        crash = Crash("engine", self._name or self._spec.runner, process.pid, process.returncode, reason, settings)
        keep_evidence(self._crash_folder, crash, process.box)

    def _may_restart(self) -> bool:
        while self._restarts and self._seconds_up - self._restarts[0] > self._watchdog.restart_window:
            self._restarts.popleft()
        if len(self._restarts) >= self._watchdog.max_restarts:
            return False
        self._restarts.append(self._seconds_up)
        return True

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """Raises NotReadyError, and QueueFullError while the process does not take requests in."""
        self._require()
        scheduler = self._spec.scheduler
        # Twice what it would queue, since its stats, which tell what it has taken in, come only now and then.
        self._check_unseen(2 * (scheduler.max_queued_requests + scheduler.max_num_seqs))
        return self._streams.submit(requests)

    def _require(self) -> None:
        if self._link is None:
            what = "has died too often and stays down" if self.failed else "is being restarted"
            raise NotReadyError(f"The engine {what}.", retry_after=RETRY_AFTER)

    async def unload_adapter(self, key: str) -> None:
        """Also done if the process is gone or dies first: the next one starts without this adapter."""
        with suppress(EngineDeadError):
            await self._calls.unload_adapter(key, inform=self._link is not None)

    async def drain(self) -> None:
        """Other processes get no new requests in, if the engine has a door; returns when it works for nobody."""
        if self._spec.door is None or self._link is None:
            return
        self._idle = asyncio.get_running_loop().create_future()
        self._door_closed = False
        self._link.send([CloseDoor()])
        await self._idle

    def _send(self, messages: Sequence[DownMessage]) -> None:
        if self._link is not None:
            self._link.send(messages)

    async def stop(self, reason: str = "The server was stopped.") -> None:
        """Ends the process and its streams. The engine may be started again."""
        await self._end_supervision()
        self._streams.give_up()  # otherwise the process would first complete what it computes
        link, self._link = self._link, None
        self._stats = EngineStats()
        self._end_drain()
        self._fail_all(EngineDeadError(reason))
        await self._end_process()
        if link is not None:
            link.close()

    async def _end_process(self) -> None:
        process = self._process
        if process is not None:
            process.tell_to_end()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._patience)
        await self._kill()

    @property
    def _patience(self) -> float:
        return _ENDING_SECONDS + (CLOSING_SECONDS if self._spec.scheduler.kv_offload_dir else 0.0)

    async def _kill(self) -> None:
        """Leaves nothing of it, nor of what it has started."""
        if self._process is not None:
            await kill_group(self._process)
            self._process = None


async def kill_group(process: WorkerProcess) -> None:
    """Also ends what a process has left behind that is dead already. Nobody must do this again later: by then another
    group can have its number."""
    process.kill()
    await process.wait()
    with suppress(ProcessLookupError):  # nobody is left
        for _ in range(round(_GRACE / _LOOK)):
            os.killpg(process.pid, 0)
            await asyncio.sleep(_LOOK)
        os.killpg(process.pid, signal.SIGKILL)


def how_it_ended(status: int | None) -> str:
    """In words, of a process's exit status, which is negative after a signal."""
    if status == -signal.SIGKILL:
        return "killed, as the system does when memory runs out"
    return signal_name(status) or f"status {status}"
