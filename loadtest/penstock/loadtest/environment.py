"""The machine of a run, without which figures cannot be compared, and the server's processes on it."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_PACKAGES = ("penstock-server", "uvloop", "msgspec", "grpcio")


def environment() -> dict[str, Any]:
    """Of the client's machine."""
    return {
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_cores() -> int:
    """All of them, whichever this process may use: what `busy_cpu_seconds` is a sum over."""
    return os.cpu_count() or 1


def busy_cpu_seconds() -> float:
    """CPU time that the whole machine has used since it was started. Guests' time is among that of users."""
    spent = psutil.cpu_times()
    return sum(getattr(spent, kind, 0.0) for kind in _BUSY)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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


def listeners(port: int) -> set[int]:
    """Processes with a TCP socket that listens on the port. Of several that share a socket it is the one with the
    lowest id, as a rule the one that has started the others."""
    with suppress(psutil.Error, OSError):  # some systems tell only root, sandboxes (gVisor) nobody
        return {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.pid
            and connection.laddr
            and connection.laddr.port == port
        }
    return set()


def family(pids: Collection[int], without: Collection[int] = ()) -> set[int]:
    """These and all that they have started, but `without` those and what those have started."""
    members: set[int] = set()
    for pid in set(pids) - set(without):
        tree = _tree(pid)
        for other in tree.intersection(without):
            tree -= _tree(other)
        members |= tree
    return members


def usage(pids: Collection[int]) -> dict[int, Usage]:
    """Of those that still run."""
    usages = {}
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            spent = process.cpu_times()
            usages[pid] = Usage(spent.user + spent.system, float(process.memory_info().rss))
    return usages


def _tree(pid: int) -> set[int]:
    with suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return set()
