"""Cores to compute on: how many there are, and how several engines of one model share them and the NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.engines.host.kernel_files import group_folders, kernel_text
from penstock.engines.host.numa import allowed_cpus, format_list, parse_list, read_nodes
from penstock.engines.host.placement import Placement


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, within its control group's share of CPU time.

    `root` is where /proc and /sys are looked for.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(root)))


def siblings(root: Path, cpu: int) -> str:
    """The logical CPUs of a core, as the kernel lists them; the CPU alone where it does not."""
    listed = kernel_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return listed.strip() or str(cpu)


def _quota(root: Path) -> int:
    """CPUs' worth of time that this process's control groups leave it; no limit is a large number."""
    return min(
        (quota for folder, version in group_folders("cpu", root) if (quota := _own_quota(folder, version))),
        default=1 << 20,
    )


def _own_quota(folder: Path, version: int) -> int | None:
    """By version 2's cpu.max or version 1's cpu.cfs_quota_us; None: no limit."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = [word for name in names for word in kernel_text(folder / name).split()]
        share = int(words[0]) / int(words[1])
    except (ValueError, IndexError, ZeroDivisionError):
        return None  # not there, or "max"
    return max(1, int(share)) if share > 0 else None


_T = TypeVar("_T")


def shares(placement: Placement, parts: int, root: Path = Path("/")) -> list[Placement]:
    """A placement for each of `parts` engines. They get NUMA nodes of their own where nodes were asked for (`auto`: all
    of the machine's), else cores of their own; several that have to share a node get cores of it. Where there are fewer
    cores than engines, all get all of them.

    What was asked for is known to be there (`find_place`). `root` is where /sys is looked for.
    """
    cpus = allowed_cpus() if placement.cpus is None else parse_list(placement.cpus)
    nodes = {node.number: node.cpus & cpus for node in read_nodes(root) if node.cpus & cpus}
    if placement.numa_nodes is None or not nodes:
        return [Placement(part, placement.numa_nodes) for part in _cores(cpus, parts, root)]
    numbers = sorted(nodes if placement.numa_nodes == "auto" else parse_list(placement.numa_nodes))
    if len(numbers) >= parts:
        return [Placement(placement.cpus, format_list(share)) for share in _split(numbers, parts)]
    of_node = [part * len(numbers) // parts for part in range(parts)]
    placements: list[Placement] = []
    for place, number in enumerate(numbers):
        placements += [
            Placement(part, str(number)) for part in _cores(nodes.get(number, cpus), of_node.count(place), root)
        ]
    return placements


def _cores(cpus: Collection[int], parts: int, root: Path) -> list[str | None]:
    """The CPUs of each part, as a list for the kernel: whole cores, in order."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        by_core.setdefault(siblings(root, cpu), []).append(cpu)
    cores = list(by_core.values())
    if len(cores) < parts:
        return [format_list(cpus)] * parts
    return [format_list(cpu for core in share for cpu in core) for share in _split(cores, parts)]


def _split(items: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """Neighbours stay together; the parts are as equal as can be."""
    return [items[part * len(items) // parts : (part + 1) * len(items) // parts] for part in range(parts)]
