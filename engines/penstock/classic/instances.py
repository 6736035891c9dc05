"""Instances of a model: the groups that say how many, and what drives each (a thread for a BackendInstance, a task for
an AsyncInstance).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic_ns
from typing import Protocol

from penstock.classic.base import AsyncInstance, BackendInstance, InstanceContext
from penstock.classic.batching.batch import ExecBatch, QueuedCall
from penstock.classic.model_config import ModelConfig, ModelInstanceGroup
from penstock.engines.errors import EngineError, PenstockError
from penstock.engines.host.gpus import visible_gpus

logger = logging.getLogger(__name__)


def instance_contexts(config: ModelConfig) -> list[InstanceContext]:
    """The instances of the configuration, named as Triton names them; without groups one on the CPU.

    Raises ValueError for a group that cannot be had here.
    """
    return [context for _, context in grouped_instances(config)]


def grouped_instances(config: ModelConfig) -> list[tuple[ModelInstanceGroup, InstanceContext]]:
    """The same, each with its group."""
    groups = list(config.instance_group) or [ModelInstanceGroup(kind=ModelInstanceGroup.KIND_CPU)]
    instances: list[tuple[ModelInstanceGroup, InstanceContext]] = []
    for index, group in enumerate(groups):
        name = group.name or f"{config.name}_{index}"
        kind, devices = _devices(group, name)
        numbered = [device for device in devices for _ in range(max(1, group.count))]
        instances += (
            (group, InstanceContext(name=f"{name}_{number}", kind=kind, device_id=device))
            for number, device in enumerate(numbered)
        )
    return instances


def _devices(group: ModelInstanceGroup, name: str) -> tuple[str, list[int]]:
    """The kind, and the devices on each of which `count` instances are loaded."""
    kind = ModelInstanceGroup.Kind.Name(group.kind)
    if kind in ("KIND_CPU", "KIND_MODEL"):
        if group.gpus:
            raise ValueError(f"instance group {name} has kind {kind} but specifies one or more GPUs")
        return kind.removeprefix("KIND_"), [0]
    present = visible_gpus()
    if kind == "KIND_AUTO" and not present:
        return "CPU", [0]
    if not present:
        raise ValueError(f"instance group {name} has kind KIND_GPU but no GPUs are available")
    wrong = [gpu for gpu in group.gpus if not 0 <= gpu < present]
    if wrong:
        raise ValueError(f"instance group {name} asks for GPU {wrong[0]}, this machine has {present}")
    return "GPU", list(group.gpus) or list(range(present))


class Owner(Protocol):
    """The model, as its instances see it; on the event loop."""

    def executed(self, batch: ExecBatch) -> None:
        """The answers of the batch can go out."""
        ...

    def changed(self, batch: ExecBatch | None = None) -> None:
        """An instance has become idle, with `batch` behind it, or ready, or lost."""
        ...


class Instance(ABC):
    """A copy of the model and what drives it. Lives on the event loop."""

    def __init__(self, name: str, owner: Owner) -> None:
        self.name = name
        self.owner = owner
        self.idle = True
        """It has no batch."""
        self.lost: PenstockError | None = None
        """Why it will never be ready again."""

    @property
    def ready(self) -> bool:
        return True

    @property
    def says_ready(self) -> bool:
        """The model's own word, which changes nothing for its requests."""
        return True

    @property
    def pid(self) -> int | None:
        """Of its process; None where it has none of its own."""
        return None

    def recover(self) -> None:
        """Tells the owner when an instance that is not ready is ready again, or lost."""

    @abstractmethod
    def execute(self, batch: ExecBatch) -> None:
        """Starts a batch. Only while idle and ready."""

    @abstractmethod
    def close(self) -> None:
        """Unloads it after its batch, if it has one."""

    def kill(self) -> None:
        """Unloads it, in the midst of its batch where that is possible. Nobody waits for that batch any more."""
        self.close()

    @abstractmethod
    async def closed(self) -> None:
        """Returns when it has been unloaded."""


class ThreadInstance(Instance):
    """Executes in a thread of its own. One wake-up of the thread and one of the loop for a batch."""

    def __init__(self, name: str, backend: BackendInstance, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, owner)
        self._backend = backend
        self._loop = loop
        self._inbox: SimpleQueue[ExecBatch | None] = SimpleQueue()
        self._closed = loop.create_future()
        # A daemon: a model that never returns must not keep the process from ending.
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def execute(self, batch: ExecBatch) -> None:
        self.idle = False
        self._inbox.put(batch)

    def close(self) -> None:
        self._inbox.put(None)

    async def closed(self) -> None:
        await asyncio.shield(self._closed)

    def _main(self) -> None:
        while (batch := self._inbox.get()) is not None:
            self._execute(batch)
            batch = None  # its tensors are not kept until the next one comes
        try:
            self._backend.unload()
        except Exception:
            logger.exception("%s could not be unloaded", self.name)
        self._wake(self._closed.set_result, None)

    def _execute(self, batch: ExecBatch) -> None:
        for single in batch.split(self._run(batch)):
            self._wake(self.owner.executed, batch)
            self._run(single)
            batch = single
        self._wake(self._finish, batch)

    def _run(self, batch: ExecBatch) -> list[QueuedCall]:
        batch.start_ns = monotonic_ns()
        error: PenstockError | None = None
        try:
            self._backend.execute(batch)
        except BaseException as raised:  # whatever a model raises, its thread has to live on
            error = model_error(self.name, raised)
        return batch.close(error)

    def _finish(self, batch: ExecBatch) -> None:
        self.idle = True
        # The next batch first: the thread works while the answers go out.
        self.owner.changed(batch)
        self.owner.executed(batch)

    def _wake(self, callback: Callable[..., object], argument: object) -> None:
        # After the loop has been closed there is nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)


class TaskInstance(Instance):
    """Drives an AsyncInstance, which has been started."""

    def __init__(self, name: str, backend: AsyncInstance, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, owner)
        self._backend = backend
        self._loop = loop
        self._batch: ExecBatch | None = None
        self._closing = False
        self._wanted = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        self._driver = loop.create_task(self._drive())

    @property
    def ready(self) -> bool:
        return self.lost is None and self._backend.ready

    @property
    def says_ready(self) -> bool:
        return self._backend.says_ready

    @property
    def pid(self) -> int | None:
        return self._backend.pid

    def recover(self) -> None:
        if self._recovery is None and self.lost is None:
            self._recovery = self._loop.create_task(self._recover())

    def execute(self, batch: ExecBatch) -> None:
        self.idle = False
        self._batch = batch
        self._wanted.set()

    def close(self) -> None:
        self._closing = True
        self._wanted.set()

    def kill(self) -> None:
        self._backend.kill()
        self._driver.cancel()

    async def closed(self) -> None:
        await asyncio.shield(self._driver)

    async def _drive(self) -> None:
        try:
            while not self._closing:
                await self._wanted.wait()
                self._wanted.clear()
                batch, self._batch = self._batch, None
                if batch is not None:
                    await self._execute(batch)
                    batch = None  # its tensors are not kept until the next one comes
        finally:
            if self._recovery is not None:
                self._recovery.cancel()
            try:
                await self._backend.unload()
            except Exception:
                logger.exception("%s could not be unloaded", self.name)

    async def _execute(self, batch: ExecBatch) -> None:
        for single in batch.split(await self._run(batch)):
            self.owner.executed(batch)
            await self._run(single)
            batch = single
        self.idle = True
        self.owner.changed(batch)
        self.owner.executed(batch)

    async def _run(self, batch: ExecBatch) -> list[QueuedCall]:
        batch.start_ns = monotonic_ns()
        error: PenstockError | None = None
        try:
            await self._backend.execute(batch)
        except Exception as raised:
            error = model_error(self.name, raised)
        return batch.close(error)

    async def _recover(self) -> None:
        try:
            await self._backend.wait_ready()
        except Exception as raised:
            self.lost = model_error(self.name, raised)
        self._recovery = None
        self.owner.changed()


def model_error(name: str, raised: BaseException) -> PenstockError:
    """What the caller is told of an exception of a model."""
    if isinstance(raised, PenstockError):
        return raised
    logger.error("%s failed", name, exc_info=raised)
    # An OSError names files of the server.
    text = raised.strerror if isinstance(raised, OSError) else str(raised)
    return EngineError(f"the model failed: {type(raised).__name__}: {text or ''}"[:400])
