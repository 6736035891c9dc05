"""A meter of what a server's processes use: CPU and memory."""

from __future__ import annotations

import resource
from time import perf_counter

import msgspec
import psutil

from penstock.loadtest.environment import busy_cpu_seconds, family, usage


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """In one run."""

    server_seconds: float
    """CPU time of the server's processes together."""
    front_seconds: float
    """Of the one that was started alone: with Penstock the gateway, without the engine."""
    foreign_cores: float
    """Used meanwhile by what is neither the server nor this command with its clients."""


class Meter:
    """Runs from its making to `read`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = self._now()

    def read(self) -> Used:
        wall, busy, own, server, front = (b - a for a, b in zip(self._began, self._now(), strict=True))
        return Used(
            server_seconds=round(server, 3),
            front_seconds=round(front, 3),
            foreign_cores=round(max(0.0, busy - own - server) / wall, 3) if wall else 0.0,
        )

    def _now(self) -> tuple[float, float, float, float, float]:
        used = {pid: process.cpu_seconds for pid, process in usage(family([self._pid])).items()}
        busy = busy_cpu_seconds()
        return perf_counter(), busy, _own_seconds(), sum(used.values()), used.get(self._pid, 0.0)


def _own_seconds() -> float:
    """Of this process and the children that it has waited for: clients do not outlive their run."""
    return sum(
        spent.ru_utime + spent.ru_stime
        for spent in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def memory_bytes(pid: int) -> int:
    """Of the process and its descendants; pages that they share count once (PSS)."""
    return sum(map(_proportional_bytes, family([pid])))


def _proportional_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0
