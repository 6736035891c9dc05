"""Figures of repeated measurements, the machine where they were made, and tables of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import msgspec

from penstock.engines import __version__
from penstock.engines.host.cores import usable_cores
from penstock.engines.host.cpu import this_cpu

_PACKAGES = ("openvino", "torch", "vllm", "numpy")

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class Spread(msgspec.Struct, frozen=True):
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


class Machine(msgspec.Struct, frozen=True):
    date: str
    cpu: str
    cores: int
    """That may be used."""
    load_average: float
    """Of the minute before: what else ran."""
    os: str
    python: str
    packages: dict[str, str]


def this_machine() -> Machine:
    return Machine(
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        cpu=_cpu(),
        cores=usable_cores(),
        load_average=round(os.getloadavg()[0], 2),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=dict(_versions()),
    )


def machine_lines(machine: Machine) -> list[str]:
    return [
        f"{machine.date}, {machine.cpu}, {machine.cores} cores, load average before {machine.load_average}",
        ", ".join(f"{name} {version}" for name, version in machine.packages.items()) + f", Python {machine.python}",
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its head, with columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _versions() -> Iterable[tuple[str, str]]:
    yield "penstock", __version__
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _cpu() -> str:
    """Its name, and what of its instructions decides how fast matrices are multiplied."""
    cpu = this_cpu()
    listed = ", ".join(name for name in _INSTRUCTIONS if name in cpu.flags)
    return cpu.name + (f" ({listed})" if listed else "")
