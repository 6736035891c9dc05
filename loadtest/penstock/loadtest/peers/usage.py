"""What a server's processes use: CPU and memory, from /proc."""

from __future__ import annotations

import os
import resource
from time import perf_counter

import msgspec

from penstock.loadtest.environment import busy_cpu_seconds

_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

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

    def read(self) -> Usage:
        wall, busy, own, server, front = (b - a for a, b in zip(self._began, self._now(), strict=True))
        return Usage(
            server_seconds=round(server, 3),
            front_seconds=round(front, 3),
            foreign_cores=round(max(0.0, busy - own - server) / wall, 3) if wall else 0.0,
        )

    def _now(self) -> tuple[float, float, float, float, float]:
        server = sum(map(cpu_seconds, tree(self._pid)))
        return perf_counter(), busy_cpu_seconds() or 0.0, _own_seconds(), server, cpu_seconds(self._pid)


def _own_seconds() -> float:
    """Of this process and the children that it has waited for: clients do not outlive their run."""
    return sum(
        spent.ru_utime + spent.ru_stime
        for spent in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def tree(pid: int) -> list[int]:
    """A process and its descendants; of those that end meanwhile, whichever are still there."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as children:
                    found += map(int, children.read().split())
        except OSError:
            continue
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads; 0 for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_bytes(pid: int) -> int:
    """Of the process and its descendants; pages that they share count once (PSS)."""
    return sum(map(_proportional_bytes, tree(pid)))


def _proportional_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
