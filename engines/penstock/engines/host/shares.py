"""How several engines of one model share CPUs and NUMA nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.engines.host.cores import siblings
from penstock.engines.host.numa import allowed_cpus, format_list, parse_list, read_nodes
from penstock.engines.host.placement import Placement

_T = TypeVar("_T")


def shares(asked: Placement, parts: int, root: Path = Path("/")) -> list[Placement]:
    """A placement for each of `parts` engines. They get NUMA nodes of their own where nodes were asked for (`auto`: all
    of the machine's), else cores of their own; several that have to share a node get cores of it. Where there are fewer
    cores than engines, all get all of them.

    What was asked for is known to be there (`find_place`). `root` is where /sys is looked for.
    """
    cpus = allowed_cpus() if asked.cpus is None else parse_list(asked.cpus)
    nodes = {node.number: node.cpus & cpus for node in read_nodes(root) if node.cpus & cpus}
    if asked.numa_nodes is None or not nodes:
        return [Placement(each, asked.numa_nodes) for each in _cores(cpus, parts, root)]
    numbers = sorted(nodes if asked.numa_nodes == "auto" else parse_list(asked.numa_nodes))
    if len(numbers) >= parts:
        return [Placement(asked.cpus, format_list(share)) for share in _split(numbers, parts)]
    of_node = [part * len(numbers) // parts for part in range(parts)]
    found: list[Placement] = []
    for place, number in enumerate(numbers):
        found += [Placement(each, str(number)) for each in _cores(nodes.get(number, cpus), of_node.count(place), root)]
    return found


def _cores(cpus: Collection[int], parts: int, root: Path) -> list[str | None]:
    """The CPUs of each part, as a list for the kernel: whole cores, in order."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        by_core.setdefault(siblings(root, cpu), []).append(cpu)
    cores = list(by_core.values())
    if len(cores) < parts:
        return [format_list(cpus)] * parts
    return [format_list(cpu for core in share for cpu in core) for share in _split(cores, parts)]


def _split(items: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """Neighbours stay together; the parts are as equal as can be."""
    return [items[part * len(items) // parts : (part + 1) * len(items) // parts] for part in range(parts)]
