"""How many cores there are to compute on."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, within its control group's share of CPU time.

    `root` is where /sys is looked for.
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
    """CPUs' worth of time by cgroup v2's cpu.max or v1's cpu.cfs_quota_us; no limit is a large number."""
    groups = root / "sys/fs/cgroup"
    for quota, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (groups / quota).read_text().split() + ((groups / period).read_text().split() if period else [])
            share = int(words[0]) / int(words[1])
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue  # not there, or "max"
        if share > 0:
            return max(1, int(share))
    return 1 << 20
