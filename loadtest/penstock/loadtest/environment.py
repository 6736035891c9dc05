"""Where a run took place: without this, figures cannot be compared."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_PACKAGES = ("penstock-server", "uvloop", "msgspec", "grpcio")


def environment() -> dict[str, Any]:
    """Of the client's machine."""
    return {
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_cores() -> int:
    """All of them, whichever this process may use: what `busy_cpu_seconds` is a sum over."""
    return os.cpu_count() or 1


def busy_cpu_seconds() -> float:
    """CPU time that the whole machine has used since it was started. Guests' time is among that of users."""
    spent = psutil.cpu_times()
    return sum(getattr(spent, kind, 0.0) for kind in _BUSY)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
