"""How many cores there are to compute on."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.engines.host.control_groups import group_folders
from penstock.engines.host.kernel_files import kernel_text


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, within its control group's share of CPU time.

    `root` is where /proc and /sys are looked for.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(root)))


def siblings(root: Path, cpu: int) -> str:
    """The logical CPUs of a core, as the kernel lists them; the CPU alone where it does not."""
    told = kernel_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return told.strip() or str(cpu)


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
