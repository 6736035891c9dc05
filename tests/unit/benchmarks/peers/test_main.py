"""A run of all groups: what goes wrong in one, and what is found out before the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import main as module
from benchmarks.peers.main import main
from benchmarks.peers.plan import Group
from benchmarks.peers.results import GroupResult, PeersReport
from penstock.loadtest.errors import LoadTestError


class Faulty:
    """GroupMeasurement that break in the first group."""

    def __init__(self, group: Group, peers_folder: object, report: PeersReport, say: object) -> None:
        self.result = GroupResult(
            table=group.table,
            model=group.model,
            titles=dict.fromkeys(group.contenders, "Title"),
            pinned=False,
            settings=report.settings,
            date=report.date,
            command=report.command,
        )

    def run(self) -> None:
        if "triton" in self.result.titles:
            raise ValueError("a surprise\nin two lines")


def test_a_fault_in_one_group_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "GroupMeasurement", Faulty)
    monkeypatch.setattr(module, "_set_up", lambda *more: {})
    out = tmp_path / "out.json"
    given = {"dir": str(tmp_path), "tables": ["tensors"], "only": ["triton", "mlserver"], "json": str(out)}
    assert main(given) == 1
    assert [group["fault"] for group in json.loads(out.read_text())["groups"]] == [
        "ValueError: a surprise\nin two lines",
        "",
    ]
    said = capsys.readouterr()
    assert "- **ended early by a fault of this command**: ValueError: a surprise\n" in said.out
    assert "Traceback" in said.err


@pytest.mark.parametrize("setting", ["json", "markdown"])
def test_files_are_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(module, "_measure", lambda *more: pytest.fail("too late"))
    with pytest.raises(LoadTestError, match="cannot be written"):
        main({"dir": str(tmp_path), setting: str(tmp_path / "none" / "out")})
