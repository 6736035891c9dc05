"""How many cores there are to compute on."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.engines.host.control_groups import group_folders


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, within its control group's share of CPU time.

    `root` is where /proc and /sys are looked for.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(root)))


def _siblings(root: Path, cpu: int) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


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
        words = [word for name in names for word in (folder / name).read_text().split()]
        share = int(words[0]) / int(words[1])
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None  # not there, or "max"
    return max(1, int(share)) if share > 0 else None
