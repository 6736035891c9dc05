"""How much memory may be used: what the machine and its control group leave free, and amounts of it as people write
them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.control_groups import group_folders
from penstock.engines.quantities import parse_size

_SHARE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*%")
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

    `root` is where /proc and /sys are looked for.
    """
    return max(0, min([_machine(root), *_control_groups(root)]))


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _control_groups(root: Path) -> list[int]:
    """What each control group that bounds this process's memory has left."""
    return [
        room
        for folder, version in group_folders("memory", root)
        if (room := _room(folder, *_MEMORY_FILES[version])) is not None
    ]


def _room(folder: Path, limit: str, usage: str) -> int | None:
    """The limit less what is used, page cache that can be dropped not counted, as in MemAvailable; None: unlimited.

    Weights that an engine maps from their files are such cache as well: who budgets counts them as that engine's.
    """
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= _NO_LIMIT:
        return None
    droppable = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))
    return int(most) - used + droppable


def taken_memory(session: int, root: Path = Path("/")) -> int:
    """Bytes that the processes of a session keep from everybody else: all that is resident but for mapped files.

    0 where there is no such session, or no /proc. `root` is where /proc is looked for.
    """
    return sum(_unshared(process) for process in (root / "proc").glob("[0-9]*") if _session(process) == session)


def _session(process: Path) -> int:
    try:
        # The name in parentheses may hold anything; after it come state, parent, process group, session (proc(5)).
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return 0


def _unshared(process: Path) -> int:
    sizes = _status_sizes(process)
    return sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)


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
    sizes = _status_sizes(root / "proc/self")
    anonymous = sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
    return ResidentMemory(anonymous, sizes.get("RssFile", 0), sizes.get("VmHWM", 0))


def _status_sizes(process: Path) -> dict[str, int]:
    """In bytes, of what its status tells of memory; empty if it has ended."""
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return {}
    told = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in told}
