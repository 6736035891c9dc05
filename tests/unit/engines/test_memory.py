from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.memory import ResidentMemory, available_memory, parse_memory, resident_memory, taken_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1 << 30),
        (4096, 4096),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5MiB", 3 << 19),
        ("500 MB", 500_000_000),
        ("40%", 400),
        ("0.5%", 5),
        ("100%", 1000),
        (" 7B ", 7),
    ],
)
def test_sizes_are_bytes_units_or_a_share_of_what_is_free(text: str | int, size: int) -> None:
    assert parse_memory(text, free=1000) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 potatoes", "-1GiB", "101%", "0", "0%", "1e9", "4GiBs", "nan", "4.GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_memory(text, free=1000)


def machine(root: Path, files: dict[str, str]) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_without_control_groups(tmp_path: Path) -> None:
    machine(tmp_path, {})
    assert available_memory(tmp_path) == 8000 * 1024


@pytest.mark.parametrize("folder", ["sys/fs/cgroup", "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"])
def test_version_2(folder: str, tmp_path: Path) -> None:
    """The limit of the group itself or of any above it; page cache that can be dropped does not count as used."""
    group = {"memory.max": f"{4 * MIB}\n", "memory.current": f"{3 * MIB}\n", "memory.stat": f"inactive_file {MIB}\n"}
    machine(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **{f"{folder}/{k}": v for k, v in group.items()}})
    assert available_memory(tmp_path) == 2 * MIB


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    group = {"memory.max": "max\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}
    machine(tmp_path, {"proc/self/cgroup": "0::/\n", **{f"sys/fs/cgroup/{k}": v for k, v in group.items()}})
    assert available_memory(tmp_path) == 8000 * 1024


@pytest.mark.parametrize(("limit", "left"), [(5 * MIB, 2 * MIB), (9223372036854771712, 8000 * 1024), (1, 0)])
def test_version_1(limit: int, left: int, tmp_path: Path) -> None:
    group = {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{4 * MIB}\n",
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {MIB}\n",
    }
    files = {f"sys/fs/cgroup/memory/box/{k}": v for k, v in group.items()}
    machine(tmp_path, {"proc/self/cgroup": "4:cpu,memory:/box\n0::/\n", **files})
    assert available_memory(tmp_path) == left


def process(root: Path, pid: int, session: int, anon: int) -> None:
    (root / f"proc/{pid}").mkdir(parents=True)
    (root / f"proc/{pid}/stat").write_text(f"{pid} (a (tricky) 1 2 3 name) S 1 {session} {session} 0 -1 0\n")
    (root / f"proc/{pid}/status").write_text(
        f"Name:\tx\nVmRSS:\t {9 * anon} kB\nRssAnon:\t {anon} kB\nRssFile:\t 5000 kB\nRssShmem:\t 1 kB\n"
    )


def test_what_a_session_has_taken(tmp_path: Path) -> None:
    """All its processes, and of each what nobody else could have instead: not the files that it has mapped."""
    process(tmp_path, 10, 10, 100)
    process(tmp_path, 11, 10, 20)
    process(tmp_path, 12, 12, 4000)
    (tmp_path / "proc/13").mkdir()  # it has just ended
    assert taken_memory(10, tmp_path) == (100 + 1 + 20 + 1) * 1024
    assert taken_memory(14, tmp_path) == 0
    assert taken_memory(14, tmp_path / "nowhere") == 0


def test_resident_memory_by_what_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    status = "Name:\tp\nVmHWM:\t 90 kB\nRssAnon:\t 50 kB\nRssFile:\t 20 kB\nRssShmem:\t 3 kB\nThreads:\t2\n"
    (tmp_path / "proc/self/status").write_text(status)
    assert resident_memory(tmp_path) == ResidentMemory(anonymous=53 * 1024, file=20 * 1024, peak=90 * 1024)
    assert resident_memory(tmp_path / "nowhere") == ResidentMemory(0, 0, 0)


def test_page_cache_in_use_can_be_dropped_too(tmp_path: Path) -> None:
    """As in MemAvailable: weights that an engine reads from their mapped file are such."""
    stat = f"inactive_file {MIB}\nactive_file {MIB}\n"
    group = {"memory.max": f"{4 * MIB}\n", "memory.current": f"{3 * MIB}\n", "memory.stat": stat}
    machine(tmp_path, {"proc/self/cgroup": "0::/a\n", **{f"sys/fs/cgroup/a/{k}": v for k, v in group.items()}})
    assert available_memory(tmp_path) == 3 * MIB
