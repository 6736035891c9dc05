"""GPU metrics over a stand-in for NVIDIA's library with the functions that are used."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.errors import MemoryBudgetError
from penstock.gateway.metrics.machine import GpuMetrics
from penstock.gateway.metrics.prometheus_text import render
from penstock.gateway.models.memory.budget import Demand, MemoryBudget, MemoryNeeds


class StandInNvml(SimpleNamespace):
    """Not the real library: two GPUs, whose values are made up; `fails` names functions that raise."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self, **fails: type[Exception]) -> None:
        super().__init__()
        readings: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=25 * (gpu + 1)),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=1000, used=10 + gpu),
            "nvmlDeviceGetPowerUsage": lambda gpu: 70_500,
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: 300_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 1_234_000,
        }
        for name, function in readings.items():
            setattr(self, name, self._failing(fails[name]) if name in fails else function)

    @staticmethod
    def _failing(error: type[Exception]) -> Any:
        def fail(*args: object) -> None:
            raise error("broken")

        return fail


def lines(monkeypatch: pytest.MonkeyPatch, nvml: object) -> list[str]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    text = render(GpuMetrics().families()).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_triton_s_names_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, StandInNvml()) == [
        'nv_gpu_utilization{gpu_uuid="GPU-0"} 0.25',
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-0"} 1000',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 1000',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"} 10',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 11',
        'nv_gpu_power_usage{gpu_uuid="GPU-0"} 70.5',
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 70.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-0"} 300.0',
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 300.0',
        'nv_energy_consumption{gpu_uuid="GPU-0"} 1234.0',
        'nv_energy_consumption{gpu_uuid="GPU-1"} 1234.0',
    ]


@pytest.mark.parametrize(
    "nvml",
    [
        None,  # not installed
        StandInNvml(nvmlInit=StandInNvml.NVMLError_LibraryNotFound),
        StandInNvml(nvmlInit=StandInNvml.NVMLError_DriverNotLoaded),
    ],
)
def test_absent_hardware_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nvml: object
) -> None:
    assert lines(monkeypatch, nvml) == []
    assert not caplog.records


def test_what_a_gpu_does_not_tell_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = StandInNvml(nvmlDeviceGetTotalEnergyConsumption=StandInNvml.NVMLError_NotSupported)
    assert not [line for line in lines(monkeypatch, nvml) if "energy" in line]
    assert not caplog.records


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetPowerUsage"])
def test_a_failing_driver_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    nvml = StandInNvml(**{broken: StandInNvml.NVMLError})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    metrics = GpuMetrics()
    for _ in range(3):
        families = {family.name: family.samples for family in metrics.families()}
    assert not families.get("nv_gpu_power_usage")
    [record] = caplog.records
    assert record.levelno == logging.WARNING


def test_memory_for_those_who_plan_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml())
    assert GpuMetrics().memory() == [("GPU-0", 1000, 10), ("GPU-1", 1000, 11)]
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml(nvmlDeviceGetMemoryInfo=StandInNvml.NVMLError_NotSupported))
    assert GpuMetrics().memory() == [None, None]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMetrics().memory() == []


def test_two_models_that_want_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget over the library's stand-in: 1000 bytes on each GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml())
    budget = MemoryBudget(gpus=GpuMetrics().memory)
    wanted = Demand(host=MemoryNeeds(), gpus=(1,), gpu_share=0.9)
    assert budget.reserve("first", wanted, lambda: None).gpus == {"GPU-1": 900}
    with pytest.raises(MemoryBudgetError, match=r"model 'second' .* of GPU GPU-1 .* unload another \(first "):
        budget.reserve("second", wanted, lambda: None)
