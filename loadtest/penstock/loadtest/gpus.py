"""GPUs of this machine during a run, by NVML."""

from __future__ import annotations

from typing import Any


class Gpus:
    """None where there is no NVML, and where it fails."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except Exception:  # not installed, no driver, no rights: a run goes on without
            self._devices = []

    def read(self) -> dict[str, float]:
        """By name: utilization in percent, used memory in bytes, power in watts."""
        found: dict[str, float] = {}
        for number, device in enumerate(self._devices):
            try:
                found[f"gpu{number}_utilization_percent"] = float(self._nvml.nvmlDeviceGetUtilizationRates(device).gpu)
                found[f"gpu{number}_memory_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(device).used)
                found[f"gpu{number}_power_watts"] = self._nvml.nvmlDeviceGetPowerUsage(device) / 1e3
            except Exception:  # what this one does not tell
                continue
        return found
