"""Measures of the machine: CPU time and memory as Linux has them, and GPUs.

Triton's `nv_gpu_*` families come from NVIDIA's management library (nvidia-ml-py, extra `[gpu]`).

Names and units are those of Triton's docs/user_guide/metrics.md: shares of 1, bytes, watts, joules. Without the
package, a driver or a GPU there are none, silently; a driver that is there and fails is told once, as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engines.host.kernel_files import kernel_sizes, kernel_text
from penstock.gateway.metrics.prometheus_text import Family, Kind

logger = logging.getLogger(__name__)

Reading = Callable[[Any, Any], float]
"""(library, device handle) to a value."""

_FAMILIES: tuple[tuple[str, Kind, str, Reading], ...] = (
    (
        "nv_gpu_utilization",
        "gauge",
        "Share of time in which kernels ran, 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "nv_gpu_memory_total_bytes",
        "gauge",
        "Memory of the GPU.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    (
        "nv_gpu_memory_used_bytes",
        "gauge",
        "Memory in use.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    ("nv_gpu_power_usage", "gauge", "Power in watts.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    (
        "nv_gpu_power_limit",
        "gauge",
        "Limit of the power in watts.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3,
    ),
    (
        "nv_energy_consumption",
        "counter",
        "Energy in joules since the driver was loaded.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
    ),
)


class GpuMemory(NamedTuple):
    uuid: str
    total: int
    """Bytes, as `used`."""
    used: int
    """By anybody."""


class GpuMetrics:
    """Reads when it is scraped. Values that a GPU does not tell are left out: older ones have no energy counter."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: dict[str, Any] = {}
        """Handles by UUID."""
        self._warned = False
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._gpus = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            return
        except pynvml.NVMLError as error:
            self._warn(error)
        self._nvml = pynvml

    def families(self) -> Iterator[Family]:
        for name, kind, text, reading in _FAMILIES if self._gpus else ():
            family = Family(name, kind, text)
            for uuid, handle in self._gpus.items():
                value = self._read(reading, handle)
                if value is not None:
                    family.add({"gpu_uuid": uuid}, value)
            yield family

    def memory(self) -> list[GpuMemory | None]:
        """Of each GPU in the driver's order; None for one that does not tell."""
        return [self._memory(uuid, handle) for uuid, handle in self._gpus.items()]

    def _memory(self, uuid: str, handle: Any) -> GpuMemory | None:
        total = self._read(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total, handle)
        used = self._read(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used, handle)
        return None if total is None or used is None else GpuMemory(uuid, int(total), int(used))

    def _read(self, reading: Reading, handle: Any) -> float | None:
        try:
            return reading(self._nvml, handle)
        except self._nvml.NVMLError_NotSupported:
            return None
        except self._nvml.NVMLError as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the metrics of the GPUs are not complete: %s", error)


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid


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
