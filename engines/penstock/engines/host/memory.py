"""Memory: what the machine and its control group leave free, what processes take, how often it was short, and amounts
as people write them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.kernel_files import group_folders, kernel_number, kernel_sizes, kernel_text
from penstock.engines.quantities import parse_size

_SHARE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*%")
_STAT = re.compile(r"(?m)^(\w+) (\d+)$")
_NO_LIMIT = 2**60
"""Control groups of version 1 write "no limit" as a number near 2**63."""
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""Limit and usage, by the version of a control group."""


def parse_memory(text: str | int, free: int | None = None) -> int:
    """Bytes in "4GiB", "500 MB", "1073741824" or "40%" (of `free`; None: of what is free now).

    Raises InvalidRequestError for anything else, for zero, and for more than 100%.
    """
    share = _SHARE.fullmatch(str(text).strip())
    if share is not None and float(share[1]) > 100:
        raise InvalidRequestError(f"{text!r} is more than all of the memory")
    if share is not None:
        size = int((available_memory() if free is None else free) * float(share[1]) / 100)
    else:
        try:
            size = parse_size(str(text))
        except ValueError:
            raise InvalidRequestError(f"{text!r} is not an amount of memory such as 4GiB, 40% or 1073741824") from None
    if size < 1:
        raise InvalidRequestError(f"{text!r} is no memory at all")
    return size


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: MemAvailable, within the limits of the control groups above us.

    `root` is where /proc and /sys are looked for. Raises OSError where the system does not tell in any way.
    """
    return max(0, min([_machine(root), *_control_groups(root)]))


def _machine(root: Path) -> int:
    sizes = kernel_sizes(root / "proc/meminfo")
    if "MemAvailable" in sizes:
        return sizes["MemAvailable"]
    if "MemFree" in sizes:  # WSL 1, and Linux before 3.14
        return sum(sizes.get(name, 0) for name in ("MemFree", "Buffers", "Cached"))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except ValueError:  # macOS has no such name
        raise OSError("the system does not tell how much memory is free") from None


def _control_groups(root: Path) -> list[int]:
    """What each control group that bounds this process's memory has left."""
    return [
        room
        for folder, version in group_folders("memory", root)
        if (room := _room(folder, *_MEMORY_FILES[version])) is not None
    ]


def _room(folder: Path, limit: str, usage: str) -> int | None:
    """The limit less what is used, page cache that can be dropped not counted, as in MemAvailable; None: unlimited.
    Where the group does not tell what is used, the limit holds all the same.

    Weights that an engine maps from their files are such cache as well: who budgets counts them as that engine's.
    """
    most = kernel_number(folder / limit)
    if most is None or not 0 <= most < _NO_LIMIT:
        return None
    stat = {name: int(number) for name, number in _STAT.findall(kernel_text(folder / "memory.stat"))}
    droppable = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
    return most - max(0, (kernel_number(folder / usage) or 0) - droppable)


def taken_memory(session: int, root: Path = Path("/")) -> int:
    """Bytes that the processes of a session keep from everybody else: all that is resident but for mapped files.

    0 where there is no such session, or no /proc. `root` is where /proc is looked for.
    """
    return sum(_unshared(process) for process in (root / "proc").glob("[0-9]*") if _session(process) == session)


def _session(process: Path) -> int:
    try:
        # The name in parentheses may hold anything; after it come state, parent, process group, session (proc(5)).
        return int(kernel_text(process / "stat").rpartition(")")[2].split()[3])
    except (ValueError, IndexError):  # it has ended meanwhile
        return 0


def _unshared(process: Path) -> int:
    return _anonymous(kernel_sizes(process / "status"))


def _anonymous(sizes: Mapping[str, int]) -> int:
    """gVisor, and Linux before 4.5, have only the sum of all kinds."""
    return sizes.get("RssAnon", sizes.get("VmRSS", 0)) + sizes.get("RssShmem", 0)


class ResidentMemory(NamedTuple):
    """Bytes of a process that are in memory."""

    anonymous: int
    """Its own, and shared with processes that it started: nothing but its end gives these back."""
    file: int
    """Of mapped files, weights for one: the system drops them when it needs the room, and reads them again."""
    peak: int
    """Most that both were together."""


def resident_memory(root: Path = Path("/")) -> ResidentMemory:
    """Of this process; zeros without /proc. `root` is where that is looked for."""
    sizes = kernel_sizes(root / "proc/self/status")
    return ResidentMemory(_anonymous(sizes), sizes.get("RssFile", 0), sizes.get("VmHWM", 0))


def memory_events(root: Path = Path("/")) -> dict[str, int]:
    """How often memory was short so far, by the names of the system's counters: those of this process's control group
    (`oom_kill`, `max`, `failcnt` ...), and as `machine_oom_kill` processes that were killed on the whole machine.

    `root` is where /proc and /sys are looked for. What cannot be read is left out.
    """
    counters = {f"machine_{name}": number for name, number in _counters(root / "proc/vmstat") if name == "oom_kill"}
    for folder, version in group_folders("memory", root):
        if folder.is_dir():
            return counters | _group_events(folder, version)
    return counters


def _group_events(folder: Path, version: int) -> dict[str, int]:
    if version == 2:
        return dict(_counters(folder / "memory.events"))
    events = {name: number for name, number in _counters(folder / "memory.oom_control") if name == "oom_kill"}
    failures = kernel_number(folder / "memory.failcnt")
    return events if failures is None else events | {"failcnt": failures}


def _counters(path: Path) -> list[tuple[str, int]]:
    """Of a file with a name and a number in each line."""
    return [(name, int(number)) for name, number in _STAT.findall(kernel_text(path))]
