"""The CPUs and NUMA nodes of this machine, and the kernel's way to write lists of them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.kernel_files import kernel_sizes, kernel_text

_NO_SOCKET = "-1"
"""What the kernel says where the firmware does not tell."""
_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node that has CPUs."""

    number: int
    cpus: frozenset[int]
    free: int
    """Bytes that can be taken of its memory, files that can be dropped counted in."""


def parse_list(text: str) -> frozenset[int]:
    """Numbers in "0-3,8". Raises InvalidRequestError for anything else."""
    if not _LIST.fullmatch(text):
        raise InvalidRequestError(f"{text!r} is not a list of numbers such as 0-3,8")
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise InvalidRequestError(f"{part} in {text!r} ends before it begins")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """The other way round: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def allowed_cpus() -> frozenset[int]:
    """CPUs that this thread, and what it starts, may run on. Raises InvalidRequestError where a system has no such
    thing."""
    if not hasattr(os, "sched_getaffinity"):
        raise InvalidRequestError("this system cannot bind a process to CPUs")
    return frozenset(os.sched_getaffinity(0))


def read_nodes(root: Path = Path("/")) -> list[Node]:
    """By number; none where the kernel says nothing of them. `root` is where /sys is looked for."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = [_node(folder) for folder in folders if folder.name.removeprefix("node").isdecimal()]
    return sorted((node for node in nodes if node.cpus), key=lambda node: node.number)


def _node(folder: Path) -> Node:
    sizes = kernel_sizes(folder / "meminfo")
    free = sum(sizes.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
    return Node(int(folder.name.removeprefix("node")), _cpus(kernel_text(folder / "cpulist").strip()), free)


def _cpus(text: str) -> frozenset[int]:
    """None as well for what is no list."""
    try:
        return parse_list(text)
    except InvalidRequestError:
        return frozenset()


def by_socket(nodes: Sequence[Node], root: Path = Path("/")) -> list[list[Node]]:
    """Nodes of the same socket together: a socket may have several. CPUs that have a socket of their own each, as in
    some virtual machines, are no reason to take a node apart."""
    groups: list[tuple[list[Node], set[str]]] = []
    for node in nodes:
        sockets = _sockets(root, node.cpus)
        same = [group for group in groups if group[1] & sockets]
        groups = [group for group in groups if group not in same]
        groups.append(([*(member for g in same for member in g[0]), node], sockets.union(*(g[1] for g in same))))
    return [members for members, _ in groups]


def _sockets(root: Path, cpus: Collection[int]) -> set[str]:
    sockets: set[str] = set()
    for cpu in cpus:
        package = kernel_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
        socket = package.strip() or _NO_SOCKET
        sockets.add(f"of CPU {cpu}" if socket == _NO_SOCKET else socket)
    return sockets
