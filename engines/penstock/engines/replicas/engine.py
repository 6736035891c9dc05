"""Several engines with the same model, as one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.engines.client.engine import Drainable, Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.messages import AddRequest
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import EngineDeadError, EngineError, NotReadyError, PenstockError
from penstock.engines.handover.memory import HandoverMemory
from penstock.engines.replicas.dispatcher import Dispatcher
from penstock.engines.replicas.membership import Membership
from penstock.engines.replicas.merged_stats import MergedStats
from penstock.engines.replicas.replica import Replica
from penstock.engines.replicas.state import MoveCounts, ReplicaSettings, ReplicaState

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Between two looks at the replicas."""
_LOOK_SECONDS_WHEN_WAITING = 0.05
"""While requests wait for a replica."""
_ADAPTER_RETRY_SECONDS = 30.0
_REACH_SECONDS = 10.0
"""Between two tries to reach an engine elsewhere that was refused, or that was not there for long."""


class ReplicatedEngine:
    """Implements Engine over engines with the same model: requests are spread over them, and go on elsewhere when one
    dies. It serves while one of them does."""

    def __init__(
        self,
        replicas: Sequence[Engine],
        settings: ReplicaSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_elsewhere: int = 0,
        fingerprint: Callable[[ModelInfo], str] = lambda info: info.runner,
        memory: HandoverMemory | None = None,
    ) -> None:
        """So many of the replicas, the last ones, run elsewhere: nobody waits for them where others serve.
        `fingerprint`: engines with the same one give the same tokens; of those that do not tell their own.
        `memory`: which they share."""
        self.replicas = [Replica(number, engine) for number, engine in enumerate(replicas)]
        self._num_own = len(replicas) - num_elsewhere
        self._members = Membership()
        self._settings = settings or ReplicaSettings()
        self._dispatcher = Dispatcher(
            self.replicas, self._members, self._settings, clock, self._is_member, self._look_soon
        )
        self._merged = MergedStats(len(replicas))
        self._fingerprint = fingerprint
        self._memory = memory
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._adapter_retry: dict[int, float] = {}
        """Replica -> when it is next told to load what it is missing."""
        self._told_moves = 0
        """Moved samples that the log has told of."""

    async def drain(self) -> None:
        """Of each replica that other servers can use, too."""
        engines = [replica.engine for replica in self.replicas]
        await asyncio.gather(*(engine.drain() for engine in engines if isinstance(engine, Drainable)))

    # -- what the gateway looks at ---------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        return self._members.info

    @property
    def ready(self) -> bool:
        return any(replica.engine.ready and self._is_member(replica) for replica in self.replicas)

    @property
    def failed(self) -> bool:
        return all(replica.engine.failed for replica in self.replicas)

    @property
    def stats(self) -> EngineStats:
        """The sum over the replicas. Counters do not fall when one is restarted."""
        return self._merged.merge([replica.engine.stats for replica in self.replicas])

    @property
    def moves(self) -> MoveCounts:
        return self._dispatcher.moves

    @property
    def has_roles(self) -> bool:
        return self._dispatcher.roles.num_prefill > 0

    def replica_states(self) -> list[ReplicaState]:
        return [
            ReplicaState(
                replica=replica.number,
                role=self._dispatcher.roles.name(replica.number),
                ready=replica.engine.ready and self._is_member(replica),
                failed=replica.engine.failed,
                restarts=replica.life,
                routed=replica.num_routed,
                known_prefix_blocks=self._dispatcher.num_known_blocks(replica),
                missing_adapters=len(replica.missing),
                stats=replica.engine.stats,
            )
            for replica in self.replicas
        ]

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the engines of this server are there, or where it has none, one elsewhere. Raises EngineError
        when one of the former cannot be loaded, or none of the latter be reached, and where streams must be resumed and
        cannot."""
        try:
            await self._start_own(self.replicas[: self._num_own])
            await self._reach(self.replicas[self._num_own :])
            if self._settings.resume_required and self._members.why_not_resumed:
                raise EngineError(f"resume: {self._members.why_not_resumed}")
            self._dispatcher.open()
        except BaseException as error:
            await asyncio.gather(self.stop("A replica could not be started."), return_exceptions=True)
            raise _first(error) from None
        logger.info("%d replicas %s", len(self.replicas), self._dispatcher.words)
        self._look_later(_LOOK_SECONDS)

    async def _start_own(self, replicas: Sequence[Replica]) -> None:
        """The first one alone, the others together: what it has read and converted they find in the page cache."""
        if replicas:
            await replicas[0].engine.start()
            async with asyncio.TaskGroup() as starts:
                for replica in replicas[1:]:
                    starts.create_task(replica.engine.start())
        for replica in replicas:
            self._join(replica)

    def _join(self, replica: Replica) -> None:
        """The engine is there, perhaps again, and perhaps another one. Raises EngineError when it does not fit."""
        replica.checked = info = replica.engine.info
        could_resume = self._members.can_resume
        fingerprint: str | None = getattr(replica.engine, "fingerprint", None)
        self._members.join(replica.number, info, self._fingerprint(info) if fingerprint is None else fingerprint)
        if could_resume and self._settings.resume and self._members.why_not_resumed:
            logger.warning("requests are not resumed: %s", self._members.why_not_resumed)

    def _is_member(self, replica: Replica) -> bool:
        """As its engine is now: one that has come back is compared with the others before it gets anything."""
        try:
            if replica.engine.info is not replica.checked:
                self._join(replica)
        except NotReadyError:
            return False
        except EngineError as error:
            logger.error("%s", error.message)
        return replica.number in self._members

    async def _reach(self, replicas: Sequence[Replica]) -> None:
        """Starts to look for engines elsewhere. Where this server has none of its own, returns when one is there."""
        first = [asyncio.get_running_loop().create_future() for _ in replicas]
        for replica, tried in zip(replicas, first, strict=True):
            self._task(self._reach_one(replica, tried))
        left = set(first) if not self._num_own else set()
        while left and not any(replica.number in self._members for replica in replicas):
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if not left and not any(replica.number in self._members for replica in replicas):
                raise EngineError(next(iter(done)).result())

    async def _reach_one(self, replica: Replica, tried: asyncio.Future[str]) -> None:
        """Until it is there. `tried` gets what became of the first try."""
        while True:
            problem = ""
            try:
                await replica.engine.start()
                self._join(replica)
            except EngineError as error:
                problem = error.message
                logger.error("replica %d: %s; it will be retried", replica.number, problem)
            if not tried.done():
                tried.set_result(problem)
            if not problem:
                return
            await replica.engine.stop()
            await asyncio.sleep(_REACH_SECONDS)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, reason: str = "The server was stopped.") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._dispatcher.close(EngineDeadError(reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.engine.stop(reason) for replica in self.replicas))
        if self._memory is not None:
            self._memory.clear()

    # -- requests --------------------------------------------------------------------------------------------

    def new_ids(self, count: int) -> tuple[int, ...]:
        return self._dispatcher.new_ids(count)

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """As `Engine.submit`; raises QueueFullError when no replica takes a request in."""
        return self._dispatcher.submit(requests)

    def abort(self, ids: Sequence[int]) -> None:
        self._dispatcher.abort(ids)

    # -- what all replicas have ------------------------------------------------------------------------------

    async def load_adapter(self, key: str, folder: Path) -> None:
        """On all replicas. Those that are down load it when they are back. Where one refuses it, none keeps it."""
        results = await asyncio.gather(
            *(replica.engine.load_adapter(key, folder) for replica in self.replicas), return_exceptions=True
        )
        down = [replica for replica, result in zip(self.replicas, results, strict=True) if _is_down(result)]
        error = _refusal(results)
        if error is not None:
            await self.unload_adapter(key)
            raise error
        for replica in down:
            replica.missing[key] = folder

    async def unload_adapter(self, key: str) -> None:
        for replica in self.replicas:
            replica.missing.pop(key, None)
        results = await asyncio.gather(
            *(replica.engine.unload_adapter(key) for replica in self.replicas), return_exceptions=True
        )
        error = next((result for result in results if result is not None and not _is_down(result)), None)
        if error is not None:
            raise error

    async def reset_prefix_cache(self) -> None:
        """Of all replicas. One that is down starts with an empty one anyway."""
        results = await asyncio.gather(
            *(replica.engine.reset_prefix_cache() for replica in self.replicas), return_exceptions=True
        )
        for replica in self.replicas:
            self._dispatcher.forget_prefixes(replica)
        error = _refusal(results)
        if error is not None:
            raise error

    async def inspect(self, since_steps: Sequence[int] = ()) -> list[EngineView | None]:
        """Of each replica; None for one that is down, or another server's."""
        since = [*since_steps, *[0] * len(self.replicas)]
        calls = [replica.engine.inspect([number]) for replica, number in zip(self.replicas, since, strict=False)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [None if isinstance(result, BaseException) else result[0] for result in results]

    # -- looking after the replicas --------------------------------------------------------------------------

    def _look_soon(self) -> None:
        self._look_later(_LOOK_SECONDS_WHEN_WAITING)

    def _look_later(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        dispatcher = self._dispatcher
        for replica in self.replicas:
            if replica.was_restarted():
                dispatcher.replica_lost(replica)
            if replica.engine.ready != replica.was_ready:
                self._changed(replica)
            if replica.missing and replica.engine.ready:
                self._load_missing(replica)
        dispatcher.retry()
        self._tell_moves()
        self._look_later(_LOOK_SECONDS_WHEN_WAITING if dispatcher.waiting else _LOOK_SECONDS)

    def _changed(self, replica: Replica) -> None:
        replica.was_ready = not replica.was_ready
        if not replica.was_ready:
            logger.warning("replica %d is not ready", replica.number)
            return
        if self._is_member(replica):
            logger.warning("replica %d serves", replica.number)

    def _tell_moves(self) -> None:
        moves = self._dispatcher.moves
        total = moves.failed_over + moves.resumed
        if total > self._told_moves:
            logger.warning("%d requests went on after their replica had died or refused them", total - self._told_moves)
            self._told_moves = total

    def _load_missing(self, replica: Replica) -> None:
        """Once in a while, since a load that is under way may take long."""
        now = self._clock()
        if now < self._adapter_retry.get(replica.number, 0.0):
            return
        self._adapter_retry[replica.number] = now + _ADAPTER_RETRY_SECONDS
        self._task(self._load_all_missing(replica))

    async def _load_all_missing(self, replica: Replica) -> None:
        for key, folder in list(replica.missing.items()):
            try:
                await replica.engine.load_adapter(key, folder)
            except PenstockError as error:
                logger.error("replica %d has no adapter %s: %s", replica.number, key, error.message)
                continue
            if replica.missing.pop(key, None) is None:  # unloaded meanwhile
                with suppress(PenstockError):
                    await replica.engine.unload_adapter(key)


def _is_down(result: BaseException | None) -> bool:
    """Of a call to a replica: it was not there, or died meanwhile."""
    return isinstance(result, NotReadyError | EngineDeadError)


def _refusal(results: Sequence[BaseException | None]) -> BaseException | None:
    """Why a call to all replicas has failed: one of them refused it, or all are down."""
    errors = [result for result in results if result is not None]
    refusal = next((error for error in errors if not _is_down(error)), None)
    return refusal or (errors[0] if len(errors) == len(results) else None)


def _first(error: BaseException) -> BaseException:
    """Of a group of errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
