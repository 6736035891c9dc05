"""The CPU as the system describes it, and as oneDNN may use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.host.cpu import read_cpu

X86 = """processor\t: 0
model name\t: A Xeon
flags\t\t: fpu avx2 fma avx_vnni avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16

processor\t: 1
flags\t\t: another
"""
ARM = """processor\t: 0
Features\t: fp asimd fphp asimdhp bf16
CPU implementer\t: 0x41
CPU variant\t: 0x1
CPU part\t: 0xd4f
"""


def read(text: str, folder: Path, machine: str = "x86_64", **environ: str) -> tuple[str, set[str]]:
    file = folder / "cpuinfo"
    file.write_text(text)
    cpu = read_cpu(file, machine, environ)
    assert cpu.machine == machine
    return cpu.name, set(cpu.flags)


def test_name_and_instructions(tmp_path: Path) -> None:
    name, flags = read(X86, tmp_path)
    assert name == "A Xeon"
    assert {"fpu", "avx512_bf16", "amx_bf16"} <= flags
    assert "another" not in flags
    assert read(ARM, tmp_path, "aarch64") == ("aarch64 0x41 0xd4f 0x1", {"fp", "asimd", "fphp", "asimdhp", "bf16"})


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("ALL", {"avx512_fp16", "amx_tile", "amx_bf16"}),
        ("nonsense", {"avx512_fp16", "amx_tile", "amx_bf16"}),
        ("AVX512_CORE_FP16", {"avx512_fp16"}),
        ("avx512_core_bf16", set()),
    ],
)
def test_instructions_that_onednn_may_not_use(limit: str, left: set[str], tmp_path: Path) -> None:
    rest = {"fpu", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"}
    assert read(X86, tmp_path, ONEDNN_MAX_CPU_ISA=limit)[1] == rest | left
    assert read(X86, tmp_path, DNNL_MAX_CPU_ISA=limit)[1] == rest | left


def test_older_limits(tmp_path: Path) -> None:
    assert "avx512_bf16" not in read(X86, tmp_path, ONEDNN_MAX_CPU_ISA="AVX512_CORE_VNNI")[1]
    assert "avx512_vnni" in read(X86, tmp_path, ONEDNN_MAX_CPU_ISA="AVX512_CORE_VNNI")[1]
    assert read(X86, tmp_path, ONEDNN_MAX_CPU_ISA="AVX2")[1] == {"fpu", "avx2", "fma"}
    assert read(X86, tmp_path, ONEDNN_MAX_CPU_ISA="SSE41")[1] == {"fpu"}


def test_a_system_without_such_a_file(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path / "missing", "arm64", {})
    assert (cpu.name, cpu.machine, cpu.flags) == ("arm64", "arm64", frozenset())
