"""Processes that a test looks at, and that may end at any moment.

What /proc says of a process is read through psutil: an end between open and read raises ProcessLookupError there, and
what was a file a moment ago is none any more.
"""

from __future__ import annotations

from contextlib import suppress

import psutil


def is_running(pid: int) -> bool:
    """Not once it has ended, even if the process that adopted it has not noticed yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(pid: int, module: str = "") -> list[psutil.Process]:
    """What a process has started and has not ended. `module`: only those that run this one."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and (not module or module in child.cmdline()):
                found.append(child)
    return found


def child_pids(pid: int) -> list[int]:
    return [child.pid for child in children(pid)]


def listening_ports(pid: int) -> list[int]:
    """Of TCP, on which this process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def has_clients(pid: int) -> bool:
    """Whether a TCP connection to a port on which this process listens is open."""
    ports, connections = listening_ports(pid), psutil.Process(pid).net_connections("tcp")
    return any(each.laddr.port in ports for each in connections if each.status == psutil.CONN_ESTABLISHED)
