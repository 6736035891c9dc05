"""The processor: its name and the instructions that libraries may use on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables by which oneDNN, and with it OpenVINO and torch, use no newer instructions."""

_INTEL_GENERATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("AVX2", ("avx2", "fma")),
    ("AVX2_VNNI", ("avx_vnni",)),
    ("AVX2_VNNI_2", ("avx_vnni_int8", "avx_ne_convert")),
    ("AVX512_CORE", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    ("AVX512_CORE_VNNI", ("avx512_vnni",)),
    ("AVX512_CORE_BF16", ("avx512_bf16",)),
    ("AVX512_CORE_FP16", ("avx512_fp16",)),
    ("AVX512_CORE_AMX", ("amx_tile", "amx_int8", "amx_bf16")),
    ("AVX512_CORE_AMX_FP16", ("amx_fp16",)),
)
"""oneDNN's values of that variable, from old to new, and the kernel's names for what each adds to those before it."""
_DESIGN = ("CPU implementer", "CPU part", "CPU variant")
_OLDEST = ("SSE41", "AVX")


@dataclass(frozen=True, slots=True)
class Cpu:
    name: str
    """As the system has it; on Arm, which has none, the numbers of its maker and design."""
    machine: str
    """The architecture: x86_64, aarch64, arm64 ..."""
    flags: frozenset[str]
    """Instructions that may be used, by the names of Linux: avx512_bf16, asimdhp. Empty on other systems."""


@cache
def this_cpu() -> Cpu:
    return read_cpu(Path("/proc/cpuinfo"), platform.machine(), os.environ)


def read_cpu(cpuinfo: Path, machine: str, environ: Mapping[str, str]) -> Cpu:
    """`cpuinfo`: a file in the form of Linux's /proc/cpuinfo, which may be missing."""
    try:
        first = cpuinfo.read_text(errors="replace").split("\n\n")[0]
    except OSError:
        first = ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())  # x86, Arm
    limit = next((environ[name] for name in _ONEDNN_LIMITS if environ.get(name)), "")
    design = [fields[name] for name in _DESIGN if name in fields]
    name = fields.get("model name") or " ".join([machine, *design])
    return Cpu(name, machine, flags - _above(limit.upper()))


def _above(limit: str) -> frozenset[str]:
    """Instructions that oneDNN leaves alone under this limit; none for a value that it does not know."""
    names = [*_OLDEST, *(name for name, _ in _INTEL_GENERATIONS)]
    if limit not in names:
        return frozenset()
    last = names.index(limit) - len(_OLDEST)
    return frozenset(flag for _, added in _INTEL_GENERATIONS[last + 1 if last >= 0 else 0 :] for flag in added)
