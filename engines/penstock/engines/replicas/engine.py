"""Several engines with the same model, as one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.engines.client.engine import Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, EngineStats
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import EngineDeadError, EngineError, NotReadyError, PenstockError
from penstock.engines.replicas.dispatcher import Dispatcher
from penstock.engines.replicas.merged_stats import MergedStats
from penstock.engines.replicas.replica import Replica
from penstock.engines.replicas.settings import ReplicaSettings
from penstock.engines.replicas.state import MoveCounts, ReplicaState

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Between two looks at the replicas."""
_LOOK_SECONDS_WHEN_WAITING = 0.05
"""While requests wait for a replica."""
_ADAPTER_RETRY_SECONDS = 30.0
_SAME = (
    "vocab_size",
    "eos_token_ids",
    "supports_logprobs",
    "supports_pooling",
    "supports_drafts",
    "supports_grammars",
    "supports_processors",
)
"""What a request may rely on, wherever it goes."""


class ReplicatedEngine:
    """Implements Engine over engines with the same model: requests are spread over them, and go on elsewhere when one
    dies. It serves while one of them does."""

    def __init__(
        self,
        replicas: Sequence[Engine],
        settings: ReplicaSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas = [Replica(number, engine) for number, engine in enumerate(replicas)]
        self._dispatcher = Dispatcher(self.replicas, settings or ReplicaSettings(), clock, self._look_soon)
        self._merged = MergedStats(len(replicas))
        self._info: ModelInfo | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._adapter_retry: dict[int, float] = {}
        """Replica -> when it is next told to load what it is missing."""
        self._told_moves = 0
        """Moved samples that the log has told of."""

    # -- what the gateway looks at ---------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """Of the replica with the least room for one request: what fits there fits everywhere."""
        if self._info is None:
            raise NotReadyError("The model is still loading.", retry_after=1)
        return self._info

    @property
    def ready(self) -> bool:
        return any(replica.engine.ready for replica in self.replicas)

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

    def replica_states(self) -> list[ReplicaState]:
        return [
            ReplicaState(
                replica=replica.number,
                ready=replica.engine.ready,
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
        """The first one alone, the others together: what it has read and converted they find in the page cache."""
        first, *others = self.replicas
        try:
            await first.engine.start()
            async with asyncio.TaskGroup() as starts:
                for replica in others:
                    starts.create_task(replica.engine.start())
        except BaseException as error:
            await asyncio.gather(*(replica.engine.stop() for replica in self.replicas), return_exceptions=True)
            raise _first(error) from None
        infos = [replica.engine.info for replica in self.replicas]
        self._info = min(infos, key=lambda info: info.context_length)
        try:
            self._dispatcher.open(infos, resumes=_check_same(infos))
        except EngineError:
            await self.stop("The replicas do not fit together.")
            raise
        logger.info("%d replicas serve %s", len(infos), self._dispatcher.words)
        self._look_later(_LOOK_SECONDS)

    async def stop(self, reason: str = "The server was stopped.") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._dispatcher.close(EngineDeadError(reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.engine.stop(reason) for replica in self.replicas))

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
                replica.was_ready = not replica.was_ready
                logger.warning("replica %d %s", replica.number, "serves again" if replica.was_ready else "is not ready")
            if replica.missing and replica.engine.ready:
                self._load_missing(replica)
        dispatcher.retry()
        self._tell_moves()
        self._look_later(_LOOK_SECONDS_WHEN_WAITING if dispatcher.waiting else _LOOK_SECONDS)

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
        task = asyncio.get_running_loop().create_task(self._load_all_missing(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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


def _check_same(infos: Sequence[ModelInfo]) -> bool:
    """Whether one replica can go on with what another has begun: all compute the same. Raises EngineError where a
    request could rely on something that one of them does not have."""
    first = infos[0]
    for number, info in enumerate(infos):
        for name in _SAME:
            if getattr(info, name) != getattr(first, name):
                raise EngineError(f"replica {number} differs from replica 0 in its {name}: they are not one model")
    if any(info.runner != first.runner for info in infos):
        names = ", ".join(sorted({info.runner for info in infos}))
        logger.warning("requests are not resumed, since the replicas compute in different ways: %s", names)
        return False
    return all(info.supports_resume for info in infos)
