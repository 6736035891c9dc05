"""Where an engine runs: lists of CPUs and nodes, what they mean on a machine made of files, and a bound process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.engines.host.numa import format_list, parse_list, read_nodes
from penstock.engines.host.placement import Placement, find_place
from penstock.engines.process.client import ProcessEngine
from penstock.engines.registry import EngineSpec

GIB = 1 << 20  # in kB
linux = pytest.mark.skipif(sys.platform != "linux", reason="binds processes")


def machine(root: Path, nodes: dict[int, tuple[str, int]], socket_of: dict[int, int]) -> Path:
    """`nodes`: CPUs and free GiB by number; `socket_of`: by CPU."""
    for number, (cpus, free) in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        sizes = {"MemTotal": 512 * GIB, "MemFree": free * GIB - 1024, "Active(file)": 1024, "HugePages_Free": None}
        lines = [f"Node {number} {name}: " + ("0" if size is None else f"{size} kB") for name, size in sizes.items()]
        (folder / "meminfo").write_text("\n".join(lines) + "\n")
    for cpu, socket in socket_of.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 8 CPUs and two nodes each, with most memory in the second socket and in node 0; node 4 has no CPUs."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    nodes = {0: ("0-3", 40), 1: ("4-7", 10), 2: ("8-11", 30), 3: ("12-15", 30), 4: ("", 100)}
    return machine(tmp_path, nodes, {cpu: cpu // 8 for cpu in range(16)})


@pytest.mark.parametrize(
    ("text", "numbers", "again"),
    [
        ("0", {0}, "0"),
        ("0-3,8", {0, 1, 2, 3, 8}, "0-3,8"),
        ("8,1,0,2-2", {0, 1, 2, 8}, "0-2,8"),
        ("5-6", {5, 6}, "5-6"),
    ],
)
def test_lists_of_numbers_and_ranges_are_read_and_written(text: str, numbers: set[int], again: str) -> None:
    assert parse_list(text) == numbers
    assert format_list(numbers) == again


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1 2", "0x1", "1-2-3", "999999", "\u0663"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_list(text)


def test_nodes_are_read_with_their_cpus_and_free_memory(two_sockets: Path) -> None:
    nodes = read_nodes(two_sockets)
    assert [node.number for node in nodes] == [0, 1, 2, 3]
    assert nodes[1].cpus == {4, 5, 6, 7}
    assert nodes[0].free == 40 << 30


@pytest.mark.parametrize(
    ("cpus", "nodes", "expected"),
    [
        ("0-2,9", None, ({0, 1, 2, 9}, set())),
        (None, "1", ({4, 5, 6, 7}, {1})),
        (None, "0-1", (set(range(8)), {0, 1})),
        ("2-5", "1", ({4, 5}, {1})),
        (None, "auto", (set(range(8, 16)), {2, 3})),
        ("0-5", "auto", (set(range(6)), set())),
        ("0-3,12", "auto", ({0, 1, 2, 3}, {0})),
    ],
)
def test_cpus_and_nodes_together_give_a_place(
    two_sockets: Path, cpus: str | None, nodes: str | None, expected: tuple[set[int], set[int]]
) -> None:
    place = find_place(Placement(cpus, nodes), two_sockets)
    assert place is not None
    assert (place.cpus, place.nodes) == expected


@pytest.mark.parametrize(
    ("cpus", "nodes", "param", "message"),
    [
        ("14-16", None, "cpus", r"CPU 16 is not available \(available: 0-15\)"),
        ("one", None, "cpus", "'one' is not a list"),
        (None, "3-5", "numa_nodes", "no NUMA node 4-5; those with CPUs are 0-3"),
        (None, "all", "numa_nodes", "'all' is not a list"),
        ("0-3", "2", "numa_nodes", "node 2 has none of the CPUs 0-3"),
    ],
)
def test_what_is_not_there(two_sockets: Path, cpus: str | None, nodes: str | None, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        find_place(Placement(cpus, nodes), two_sockets)
    assert caught.value.param == param


def test_nothing_is_asked_for(two_sockets: Path) -> None:
    assert find_place(Placement(), two_sockets) is None


@pytest.mark.parametrize("socket", [0, -1])
def test_auto_changes_nothing_where_there_is_no_choice(
    socket: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    empty, one = tmp_path / "empty", machine(tmp_path / "one", {0: ("0-3", 8)}, dict.fromkeys(range(4), socket))
    for root in (empty, one):
        place = find_place(Placement(numa_nodes="auto"), root)
        assert place is not None
        assert (place.cpus, place.nodes) == ({0, 1, 2, 3}, set())
    with pytest.raises(InvalidRequestError, match="the system names none"):
        find_place(Placement(numa_nodes="0"), empty)


def test_a_system_that_cannot_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    with pytest.raises(InvalidRequestError, match="cannot bind") as caught:
        find_place(Placement(cpus="0"))
    assert caught.value.param == "cpus"


@linux
async def test_an_engine_process_stays_on_its_cpus() -> None:
    [*_, last] = sorted(os.sched_getaffinity(0))
    nodes = [node.number for node in read_nodes() if last in node.cpus]
    asked = Placement(str(last), format_list(nodes) or None)
    engine = ProcessEngine(EngineSpec(runner="simulated", options={"num_blocks": 64}, placement=asked))
    await engine.start()
    try:
        assert engine.pid is not None
        assert os.sched_getaffinity(engine.pid) == {last}
        policy = Path(f"/proc/{engine.pid}/numa_maps")
        if nodes and policy.is_file():
            _, name, *_ = policy.read_text().splitlines()[0].split()
            assert name in ("prefer", "default")  # the latter where a container forbids memory policies
    finally:
        await engine.stop()
    assert os.sched_getaffinity(0) >= {last}


@linux
async def test_a_process_that_cannot_be_bound_says_why() -> None:
    engine = ProcessEngine(EngineSpec(runner="simulated", options={"num_blocks": 64}, placement=Placement("99999")))
    with pytest.raises(EngineError, match="CPU 99999 is not available"):
        await engine.start()
    await engine.stop()
