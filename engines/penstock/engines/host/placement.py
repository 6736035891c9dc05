"""The CPUs and NUMA nodes that an engine runs on."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection
from pathlib import Path

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.numa import Node, allowed_cpus, by_socket, format_list, parse_list, read_nodes

logger = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, by machine; glibc has no function for it, and libnuma is often not there."""
_MPOL_PREFERRED_MANY = 5
"""Linux 5.15: from these nodes while they have memory, then from others. MPOL_BIND would kill the process instead."""
_MASK_BITS = 1024


class Placement(msgspec.Struct, frozen=True):
    """What was asked for; lists of numbers as the kernel writes them."""

    cpus: str | None = None
    """None: all that the process may run on."""
    numa_nodes: str | None = None
    """auto: those of one socket. None: no node is preferred."""


class Place(msgspec.Struct, frozen=True):
    """What that means on this machine."""

    cpus: frozenset[int]
    nodes: frozenset[int]
    """Whose memory is preferred; empty: memory comes from where the thread runs that touches it first."""

    def __str__(self) -> str:
        memory = f", with memory of NUMA node {format_list(self.nodes)}" if self.nodes else ""
        return f"CPUs {format_list(self.cpus)}{memory}"


def find_place(placement: Placement, root: Path = Path("/")) -> Place | None:
    """None: nothing was asked for. Raises InvalidRequestError, whose `param` is the setting, for CPUs and nodes that
    are not there. `root` is where /sys is looked for."""
    if placement.cpus is None and placement.numa_nodes is None:
        return None
    setting = "cpus"
    try:
        cpus = allowed_cpus() if placement.cpus is None else _known(parse_list(placement.cpus), allowed_cpus())
        if placement.numa_nodes is None:
            return Place(cpus, frozenset())
        setting = "numa_nodes"
        nodes = read_nodes(root)
        chosen = _roomiest(nodes, cpus, root) if placement.numa_nodes == "auto" else _named(placement.numa_nodes, nodes)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=setting) from None
    within = cpus & frozenset(cpu for node in chosen for cpu in node.cpus) if chosen else cpus
    if not within:
        raise InvalidRequestError(
            f"node {placement.numa_nodes} has none of the CPUs {format_list(cpus)}, on which the engine may run",
            param=setting,
        )
    return Place(within, frozenset(node.number for node in chosen))


def bind(placement: Placement) -> None:
    """Binds the calling thread, and all that it starts from now on. Raises as `find_place`."""
    place = find_place(placement)
    if place is None:
        return
    os.sched_setaffinity(0, place.cpus)
    if place.nodes and not _prefer_memory_of(place.nodes):
        logger.info("the system allows no memory policy: memory comes from the node of the CPU that uses it first")
    logger.info("the engine runs on %s", place)


def _known(numbers: frozenset[int], allowed: frozenset[int]) -> frozenset[int]:
    missing = numbers - allowed
    if missing:
        raise InvalidRequestError(f"CPU {format_list(missing)} is not available (available: {format_list(allowed)})")
    return numbers


def _named(text: str, nodes: list[Node]) -> list[Node]:
    numbers, there = parse_list(text), {node.number: node for node in nodes}
    missing = numbers - there.keys()
    if missing:
        known = f"those with CPUs are {format_list(there)}" if there else "the system names none at all"
        raise InvalidRequestError(f"this machine has no NUMA node {format_list(missing)}; {known}")
    return [there[number] for number in sorted(numbers)]


def _roomiest(nodes: list[Node], cpus: Collection[int], root: Path) -> list[Node]:
    """Of the sockets with some of these CPUs the one with the most free memory: several engines spread over them. None
    where there is no choice."""
    reachable = [[n for n in socket if n.cpus.intersection(cpus)] for socket in by_socket(nodes, root)]
    sockets = [socket for socket in reachable if socket]
    if len(sockets) < 2:
        return []
    return max(sockets, key=lambda socket: sum(node.free for node in socket))


def _prefer_memory_of(nodes: Collection[int]) -> bool:
    """Whether the kernel takes that; containers often forbid it."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or max(nodes) >= _MASK_BITS:
        return False
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return bool(call(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED_MANY), mask, ctypes.c_ulong(_MASK_BITS)) == 0)
