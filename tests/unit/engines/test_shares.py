"""How engines of one model share a machine that is made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.host.cores import shares
from penstock.engines.host.placement import Placement


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four nodes of two cores with two threads each: CPUs n and n + 8 are one core."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    for node in range(4):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1},{2 * node + 8}-{2 * node + 9}\n")
    for cpu in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "parts", "expected"),
    [
        (Placement(), 2, [("0-3,8-11", None), ("4-7,12-15", None)]),
        (Placement("0-2"), 3, [("0", None), ("1", None), ("2", None)]),
        (Placement("0-1"), 3, [("0-1", None)] * 3),
        (Placement(None, "0-3"), 4, [(None, "0"), (None, "1"), (None, "2"), (None, "3")]),
        (Placement(None, "auto"), 2, [(None, "0-1"), (None, "2-3")]),
        (Placement(None, "1,3"), 3, [("2,10", "1"), ("3,11", "1"), ("6-7,14-15", "3")]),
        (Placement("0-3", "0-1"), 2, [("0-3", "0"), ("0-3", "1")]),
    ],
)
def test_each_engine_has_its_own_cores_or_nodes_where_there_are_enough(
    machine: Path, asked: Placement, parts: int, expected: list[tuple[str | None, str | None]]
) -> None:
    assert shares(asked, parts, machine) == [Placement(*each) for each in expected]
