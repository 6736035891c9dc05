"""The server's processes, where it runs on this machine, and what they use: from /proc. Elsewhere none is found."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

_LISTENING = "0A"
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Usage(msgspec.Struct, frozen=True):
    cpu_seconds: float
    """Of user and system time, since each process began."""
    rss_bytes: float
    """Pages that processes share count for each of them."""


def is_local(url: str) -> bool:
    """Whether it is this machine: the loopback address, another one of its own, or its name."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or (not address.is_unspecified and _is_own(address))
    return host in ("localhost", socket.gethostname().lower())


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """A socket can be bound to no other."""
    kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def listeners(port: int, root: Path = Path("/proc")) -> set[int]:
    """Processes with a TCP socket that listens on the port."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port, root)}
    if not inodes:
        return set()
    return {pid for pid in _pids(root) if not inodes.isdisjoint(_links(root / str(pid) / "fd"))}


def family(pids: Collection[int], without: Collection[int] = (), root: Path = Path("/proc")) -> set[int]:
    """These and all that they have started, but `without` those and what those have started."""
    children: dict[int, list[int]] = {}
    for pid in _pids(root):
        fields = _stat(pid, root)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in found and pid not in without:
            found.add(pid)
            todo += children.get(pid, ())
    return found


def usage(pids: Collection[int], root: Path = Path("/proc")) -> dict[int, Usage]:
    """Of those that still run."""
    found = {}
    for pid in pids:
        fields = _stat(pid, root)
        if fields is not None:
            found[pid] = Usage((int(fields[11]) + int(fields[12])) / _TICKS, float(int(fields[21]) * _PAGE))
    return found


def _inodes(port: int, root: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _pids(root: Path) -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir(root) if name.isdigit())


def _links(folder: Path) -> set[str]:
    found = set()
    with suppress(OSError):  # another user's process, or one that has ended
        for name in os.listdir(folder):
            with suppress(OSError):
                found.add(os.readlink(folder / name))
    return found


def _stat(pid: int, root: Path) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on: its name may hold spaces."""
    try:
        return (root / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
