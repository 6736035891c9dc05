"""A ledger of the memory that models take and want, which is asked before each is loaded.

What a model was counted with stays counted until it is gone, whether its engine has taken that yet or not: KV caches
are filled by requests, an engine that died comes back, and others may be loading at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from penstock.engines.errors import MemoryBudgetError
from penstock.engines.host.gpus import shown_gpus
from penstock.engines.host.memory import available_memory, parse_memory, taken_memory
from penstock.gateway.metrics.machine import GpuMemory

logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWish:
    """The size that the KV cache should have: `fixed` bytes, or a share of what is free beside the other needs."""

    fixed: int | None = None
    share: float = 0.0
    least: int = 0
    """Bytes below which the model is of no use."""
    most: int | None = None
    """Bytes that requests could fill."""

    def of_one(self, parts: int) -> CacheWish:
        """The wish of one of several engines that share what is free."""
        return replace(self, share=self.share / parts)

    def size(self, left: int) -> int:
        """Bytes, where so much is left beside the other needs."""
        if self.fixed is not None:
            return self.fixed
        size = int(max(left, 0) * self.share)
        return max(self.least, size if self.most is None else min(size, self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Needs of one kind of memory, in bytes."""

    weights: int = 0
    cache: CacheWish = CacheWish(fixed=0)
    rest: int = 0
    """The process, activations, logits, adapters."""

    def of_one(self, parts: int) -> MemoryNeeds:
        return replace(self, cache=self.cache.of_one(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model wants of a machine."""

    host: MemoryNeeds
    device: MemoryNeeds = MemoryNeeds()
    """Of each of `gpus`."""
    gpus: Sequence[int] = ()
    """Places among those that CUDA shows."""
    gpu_share: float | None = None
    """Of each GPU's whole memory, which the engine takes and divides by itself."""
    workers: int = 1
    """Processes with a KV cache each, in the host's memory."""
    sets_cache: bool = False
    """The engine has to be told the size of the cache: by itself it would take a share of what it finds free, as would
    any other that is loaded at the same time."""
    hints: str = ""
    """Settings that make it smaller."""

    def of_one(self, parts: int) -> Demand:
        """Of one of several engines on the same devices: the shares of what is free are theirs together."""
        return replace(self, host=self.host.of_one(parts), device=self.device.of_one(parts))


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a model is counted with."""

    weights: int
    cache: int
    rest: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.rest

    def __str__(self) -> str:
        parts = [f"{size_text(self.weights)} weights"]
        parts += [f"{size_text(self.cache)} KV cache"] if self.cache else []
        parts += [f"{size_text(self.rest)} for the process and its steps"]
        return f"{size_text(self.total)}: {', '.join(parts)}"


@dataclass(slots=True, eq=False)
class Reservation:
    """A model's place in the ledger."""

    name: str
    host: Need
    pid: Callable[[], int | None]
    """The engine's process, which leads a session of its own; None while there is none."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Bytes by UUID."""
    cache: int | None = None
    """Bytes that the engine has to be told for its KV cache, for each worker."""
    loading: bool = True
    """Until then it is not known how much of a GPU's used memory is this model's."""
    ending: bool = False
    """It will be released soon."""
    taken: Callable[[], int] | None = None
    """Bytes that it has taken, where that is not the memory of the session of `pid`."""


class RoomMaker(Protocol):
    """Unloads models when others need their memory."""

    async def __call__(self, name: str, check: Callable[[Collection[str]], object]) -> bool:
        """Whether there may be room now. `check` raises MemoryBudgetError if the model would not fit, were these models
        gone; what it raises for all that may go, this raises, too."""
        ...


class MemoryBudget:
    """All language models of a server, and with loading on demand its classic models. Lives on the event loop.

    `limit` is the setting memory_limit, a share being of what is free now; raises InvalidRequestError for one that is
    none. `gpus` tells the memory of each GPU, in the driver's order. `available` and `taken` read the machine's.
    """

    def __init__(
        self,
        limit: str | int | None = None,
        gpus: Callable[[], Sequence[GpuMemory | None]] = lambda: (),
        *,
        available: Callable[[], int] = available_memory,
        taken: Callable[[int], int] = taken_memory,
    ) -> None:
        self._limit = None if limit is None else parse_memory(limit)
        self._gpus = gpus
        self._available = available
        self._taken = taken
        self._reservations: list[Reservation] = []
        self._foreign: dict[str, int] = {}
        """Bytes of each GPU that are not our models', as last seen when none of them was loading."""
        self._released = asyncio.Event()
        self.make_room: RoomMaker | None = None

    async def claim(self, name: str, demand: Demand, pid: Callable[[], int | None]) -> Reservation:
        """As `reserve`, but waits for models that are ending: unloading is answered before it is done. Where others may
        be unloaded for this one, they are."""
        while True:
            released = self._released
            try:
                return self.reserve(name, demand, pid)
            except MemoryBudgetError:
                if any(reservation.ending for reservation in self._reservations):
                    await released.wait()
                    continue
                if self.make_room is None or not await self.make_room(name, partial(self._place, name, demand, pid)):
                    raise

    def reserve(self, name: str, demand: Demand, pid: Callable[[], int | None]) -> Reservation:
        """Raises MemoryBudgetError for a model that does not fit beside those that are loaded or loading."""
        reservation = self._place(name, demand, pid)
        self._reservations.append(reservation)
        gpus = "".join(f"; {size_text(size)} of GPU {uuid}" for uuid, size in reservation.gpus.items())
        logger.info("memory of %s is counted as %s%s", name, reservation.host, gpus)
        return reservation

    def _place(
        self, name: str, demand: Demand, pid: Callable[[], int | None], gone: Collection[str] = ()
    ) -> Reservation:
        """What the model would be counted with, were the models `gone` not there. Raises MemoryBudgetError."""
        room, of_what = self._host_room(gone)
        host = _need(demand.host, room)
        if room is not None and host.total > room:
            raise MemoryBudgetError(self._refusal(name, f"{host}", f"{size_text(room)} {of_what}", demand.hints, gone))
        reservation = Reservation(name, host, pid)
        if demand.sets_cache and not demand.gpus and room is not None:
            reservation.cache = host.cache // demand.workers
        for gpu in self._of(demand.gpus):
            device = self._on_gpu(name, demand, gpu, gone)
            reservation.gpus[gpu.uuid] = device.total
            if demand.sets_cache:
                reservation.cache = min(device.cache, reservation.cache or device.cache)
        return reservation

    @property
    def limit(self) -> int | None:
        """Bytes that all models may take together; None: what is free."""
        return self._limit

    def rows(self) -> list[dict[str, object]]:
        """What each model is counted with, in bytes, for operators."""
        return [
            {
                "name": reservation.name,
                "weights": reservation.host.weights,
                "cache": reservation.host.cache,
                "rest": reservation.host.rest,
                "gpus": reservation.gpus,
                "loading": reservation.loading,
                "pid": reservation.pid(),
            }
            for reservation in self._reservations
        ]

    def release(self, reservation: Reservation) -> None:
        """Its engine has ended. A second time is no harm."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._released.set()
            self._released = asyncio.Event()

    def _host_room(self, gone: Collection[str]) -> tuple[int | None, str]:
        """Bytes, and what they are; None where the machine does not tell."""
        holders = [
            (reservation.host.total, self._taken_by(reservation))
            for reservation in self._reservations
            if reservation.name not in gone
        ]
        freed = sum(self._taken_by(reservation) for reservation in self._reservations if reservation.name in gone)
        try:
            missing = sum(max(0, need - has) for need, has in holders)
            room, of_what = self._available() + freed - missing, "are free"
        except OSError:  # no /proc
            room, of_what = None, ""
        if self._limit is not None:
            left = self._limit - sum(max(need, has) for need, has in holders)
            if room is None or left < room:
                room, of_what = left, f"of memory_limit {size_text(self._limit)} are left"
        return None if room is None else max(0, room), of_what

    def _taken_by(self, reservation: Reservation) -> int:
        if reservation.taken is not None:
            return reservation.taken()
        pid = reservation.pid()
        return 0 if pid is None else self._taken(pid)

    def _of(self, places: Sequence[int]) -> list[GpuMemory]:
        """Those of the GPUs that can be told apart and tell their memory: the others are not checked."""
        present = self._gpus() if places else ()
        shown = shown_gpus(len(present))
        gpus: list[GpuMemory] = []
        for place in places:
            which = shown[place] if place < len(shown) else None
            if isinstance(which, int):
                gpus += [gpu for gpu in present[which : which + 1] if gpu is not None]
            elif which is not None:
                gpus += [gpu for gpu in present if gpu is not None and gpu.uuid.startswith(which)]
        return gpus

    def _on_gpu(self, name: str, demand: Demand, gpu: GpuMemory, gone: Collection[str]) -> Need:
        """What the model is counted with on this GPU. Raises MemoryBudgetError."""
        here = [reservation for reservation in self._reservations if gpu.uuid in reservation.gpus]
        held = sum(reservation.gpus[gpu.uuid] for reservation in here)
        if not any(reservation.loading for reservation in here):
            self._foreign[gpu.uuid] = max(0, gpu.used - held)
        held -= sum(reservation.gpus[gpu.uuid] for reservation in here if reservation.name in gone)
        room = max(0, gpu.total - self._foreign.get(gpu.uuid, 0) - held)
        share = None if demand.gpu_share is None else int(demand.gpu_share * gpu.total)
        need = _need(demand.device, room if share is None else share)
        left = f"{size_text(room)} of GPU {gpu.uuid} ({size_text(gpu.total)}) are free"
        if share is None:
            if need.total > room:
                raise MemoryBudgetError(self._refusal(name, f"{need}", left, demand.hints, gone, gpu.uuid))
            return need
        taking = f"{size_text(share)} (gpu_memory_utilization {demand.gpu_share:g})"
        cache = demand.device.cache.fixed or demand.device.cache.least
        if need.weights + cache > share:
            sizes = f"at least {size_text(need.weights)} weights and {size_text(cache)} KV cache on each GPU"
            raise MemoryBudgetError(self._refusal(name, sizes, f"it may take {taking}", demand.hints, gone, gpu.uuid))
        if share > room:
            raise MemoryBudgetError(self._refusal(name, taking, left, demand.hints, gone, gpu.uuid))
        return Need(need.weights, need.cache, share - need.weights - need.cache)

    def _refusal(
        self, name: str, need: str, left: str, hints: str, gone: Collection[str], gpu: str | None = None
    ) -> str:
        holders = [
            f"{reservation.name} {size_text(reservation.host.total if gpu is None else reservation.gpus[gpu])}"
            for reservation in self._reservations
            if reservation.name not in gone and (gpu is None or gpu in reservation.gpus)
        ]
        helps = [f"make it smaller ({hints})"] if hints else []
        helps += [f"unload another ({', '.join(holders)})"] if holders else []
        parts = [f"model '{name}' does not fit into memory: it needs {need}", left, *helps[:1]]
        return "; ".join(parts) + "".join(f" or {hint}" for hint in helps[1:])


def _need(part: MemoryNeeds, room: int | None) -> Need:
    left = None if room is None else room - part.weights - part.rest
    return Need(part.weights, part.cache.size(left or 0), part.rest)


def size_text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
