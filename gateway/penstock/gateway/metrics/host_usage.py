"""The machine's CPU time and memory, as Linux tells them."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.host.kernel_files import kernel_sizes, kernel_text

_PROC = Path("/proc")


class CpuMeter:
    """Utilization between two looks."""

    def __init__(self) -> None:
        self._busy, self._all = _cpu_times()
        self._last = 0.0

    def utilization(self) -> float:
        """Share of CPU time in use since the last call, 0 to 1; 0 where the system does not tell."""
        busy, total = _cpu_times()
        if total > self._all:
            self._last = (busy - self._busy) / (total - self._all)
            self._busy, self._all = busy, total
        return self._last


def memory_bytes() -> tuple[int, int]:
    """(total, used); (0, 0) where the system does not tell."""
    values = kernel_sizes(_PROC / "meminfo")
    total = values.get("MemTotal", 0)
    return total, total - values.get("MemAvailable", total)


def _cpu_times() -> tuple[int, int]:
    """(busy, all) in clock ticks since the start of the system."""
    first = kernel_text(_PROC / "stat").split("\n", 1)[0]
    fields = [int(field) for field in first.split()[1:] if field.isdecimal()]
    total = sum(fields[:8])  # guest time is in user time already
    return total - sum(fields[3:5]), total
