"""Machines whose kernel tells less than Linux does, or something else: each reader of /proc and /sys has an answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engines.host.cores import shares, usable_cores
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.kernel_files import kernel_number, kernel_sizes, kernel_text
from penstock.engines.host.memory import ResidentMemory, available_memory, resident_memory, taken_memory
from penstock.engines.host.numa import by_socket, read_nodes
from penstock.engines.host.placement import Placement, find_place
from penstock.engines.openvino.process_memory import _filled
from penstock.gateway.metrics import machine

KB = 1024
NODE, CPU = "sys/devices/system/node", "sys/devices/system/cpu"
MEMORY, SHARE = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu"
FREE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
GARBAGE = ("", "\n", "max", "max max", "-1", "a: b: c", "1 2 3", "99999999999999999999", "0-", ":", "\x00", "kB kB kB")
FILES = [
    *("proc/meminfo", "proc/stat", "proc/self/cgroup", "proc/self/status", "proc/self/smaps", "proc/7/stat"),
    *("proc/7/status", f"{NODE}/node0/cpulist", f"{NODE}/node0/meminfo"),
    *(f"{CPU}/cpu{number}/topology/thread_siblings_list" for number in (0, 1)),
    f"{CPU}/cpu0/topology/physical_package_id",
    *(f"sys/fs/cgroup/{name}" for name in ("memory.max", "memory.current", "memory.stat", "cpu.max")),
    *(f"{MEMORY}/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
    *(f"{SHARE}/cpu.cfs_{name}_us" for name in ("quota", "period")),
]


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def look(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a start asks of its machine."""
    assert available_memory(root) >= 0
    assert 1 <= usable_cores(root) <= 2
    assert by_socket(read_nodes(root), root) in ([], [read_nodes(root)])
    assert find_place(Placement(numa_nodes="auto"), root) is not None
    assert len(shares(Placement(), 2, root)) == 2
    assert visible_gpus(root) == 0
    assert taken_memory(7, root) >= 0
    assert min(resident_memory(root)) >= 0
    assert list(_filled(root / "proc/self/smaps")) == []
    monkeypatch.setattr(machine, "_PROC", root / "proc")
    assert 0 <= machine.CpuMeter().utilization() <= 1
    total, used = machine.memory_bytes()
    assert 0 <= used <= total


@pytest.mark.parametrize("text", GARBAGE)
def test_files_that_say_something_else(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, dict.fromkeys(FILES, text))
    look(tmp_path, monkeypatch)


def test_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look(tmp_path, monkeypatch)


def test_folders_where_files_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        (tmp_path / name).mkdir(parents=True)
    look(tmp_path, monkeypatch)


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError, PermissionError, OSError])
def test_files_that_cannot_be_read(error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends between open and read is a ProcessLookupError."""
    write(tmp_path, dict.fromkeys(FILES, "1"))

    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        raise error("no")

    monkeypatch.setattr(Path, "read_text", read_text)
    look(tmp_path, monkeypatch)
    assert (kernel_text(tmp_path), kernel_number(tmp_path), kernel_sizes(tmp_path)) == ("", None, {})


def test_memory_of_wsl_1(tmp_path: Path) -> None:
    """No MemAvailable, and no control groups."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 500 kB\nBuffers: 30 kB\nCached: 4 kB\n"})
    assert available_memory(tmp_path) == 534 * KB


def test_a_limit_holds_without_the_files_beside_it(tmp_path: Path) -> None:
    """In gVisor there is no memory.stat."""
    write(tmp_path, FREE | {f"{MEMORY}/memory.limit_in_bytes": f"{700 * KB}\n", "proc/self/cgroup": "3:memory:/\n"})
    assert available_memory(tmp_path) == 700 * KB
    write(tmp_path, {f"{MEMORY}/memory.usage_in_bytes": f"{200 * KB}\n"})
    assert available_memory(tmp_path) == 500 * KB
    write(tmp_path, {f"{MEMORY}/memory.stat": f"odd\ntotal_inactive_file {50 * KB}\nwhat is this\n"})
    assert available_memory(tmp_path) == 550 * KB


def test_an_empty_list_of_groups_is_as_none(tmp_path: Path) -> None:
    write(tmp_path, FREE | {"proc/self/cgroup": "", "sys/fs/cgroup/memory.max": f"{300 * KB}\n"})
    assert available_memory(tmp_path) == 300 * KB


def test_controllers_of_version_1_in_one_folder_without_a_link(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/box"
    write(tmp_path, {"proc/self/cgroup": "4:cpu,cpuacct:/box\n", f"{folder}/cpu.cfs_quota_us": "100000\n"})
    assert usable_cores(tmp_path) == 2
    write(tmp_path, {f"{folder}/cpu.cfs_period_us": "100000\n"})
    assert usable_cores(tmp_path) == 1


def test_cores_that_the_kernel_names_without_saying_which(tmp_path: Path) -> None:
    """Empty lists for all CPUs do not make them one core."""
    write(tmp_path, {f"{CPU}/cpu{number}/topology/thread_siblings_list": "\n" for number in (0, 1)})
    assert usable_cores(tmp_path) == 2


def test_processes_whose_memory_is_one_number(tmp_path: Path) -> None:
    """In gVisor; a program's name may look like a size."""
    status = "Name:\t5 kB\nUmask:\todd kB\nVmRSS:\t 70 kB\n"
    write(tmp_path, {"proc/7/stat": "7 (x) S 1 7 7 0", "proc/7/status": status, "proc/self/status": status})
    assert taken_memory(7, tmp_path) == 70 * KB
    assert resident_memory(tmp_path) == ResidentMemory(70 * KB, 0, 0)


def test_free_memory_is_asked_of_the_system_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_memory(tmp_path) == 40960

    def unknown(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    with pytest.raises(OSError, match="does not tell how much memory is free"):
        available_memory(tmp_path)
