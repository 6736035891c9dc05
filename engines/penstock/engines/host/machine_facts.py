"""Facts about the machine and its packages, for reports of problems."""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.engines.host.kernel_files import group_folders
from penstock.engines.host.memory import available_memory, memory_events

_PACKAGES = (
    *("penstock-server", "openvino", "tokenizers", "numpy", "msgspec", "pyzmq", "uvloop", "grpcio", "llguidance"),
    *("torch", "transformers", "vllm", "tensorrt-llm", "onnxruntime", "onnxruntime-gpu", "tensorflow-cpu", "ray"),
)
_LIMITS = {
    "memory": ("memory.max", "memory.high", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "cpu": ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
}
"""Files of control groups, of both versions."""
_VARIABLES = ("OMP_", "KMP_", "ONEDNN_", "DNNL_", "OV_", "OPENVINO_", "MKL_", "GLIBC_", "MALLOC_", "CUDA_", "PENSTOCK_")
"""Beginnings of the names of variables that change how models are computed."""


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed, by name."""
    known = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def machine() -> dict[str, Any]:
    """Kernel, CPU, memory and the limits of this process. Nothing that names the machine or its user."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        **_cpu(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "memory": total_memory(),
        "memory_available": available_memory(),
        "memory_events": memory_events(),
        "control_group": _limits(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "address_space": resource.getrlimit(resource.RLIMIT_AS)[0],
    }


def variables() -> dict[str, str]:
    """Of the environment, those that matter; secrets are among them."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def _cpu() -> dict[str, str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        fields = dict(line.replace("\t", "").partition(":")[::2] for line in lines)
        flags = [flag for flag in fields.get("flags", "").split() if flag.startswith(("avx", "amx", "fma", "sse4"))]
        return {"cpu": fields.get("model name", "").strip(), "cpu_flags": " ".join(flags)}
    return {}


def total_memory() -> int:
    """Bytes of the machine, whatever a control group leaves of it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> dict[str, str]:
    """Of the nearest control group that is there."""
    limits = {}
    for controller, names in _LIMITS.items():
        nearest = [folder for folder, _ in group_folders(controller) if folder.is_dir()][:1]
        for path in (folder / name for folder in nearest for name in names):
            with suppress(OSError):
                limits[path.name] = path.read_text().strip()
    return limits
