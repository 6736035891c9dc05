"""Tables that are written into documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.results import PeersReport
from benchmarks.peers.settings import settings
from benchmarks.peers.update import check, update
from penstock.loadtest.errors import LoadTestError


def report(date: str) -> PeersReport:
    return PeersReport(date=date, command="c", settings=settings({"dir": "d"}), environment={"cpu": date}, versions={})


def test_only_what_stands_between_the_marks_changes(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    last = "<!-- peers: short --><!-- /peers -->\n"
    file.write_text(f"# Ours\n<!-- peers: tables -->\nold\n<!-- /peers -->\nours\n{last}")
    check(str(file))
    assert update(str(file), report("2026-01-01")) == ""
    once = file.read_text()
    assert once.startswith("# Ours\n<!-- peers: tables -->\n\n2026-01-01, ")
    assert "\n### In short\n" in once
    assert "old" not in once
    assert once.endswith(f"\n<!-- /peers -->\nours\n{last}"), "a mark has its own line"
    update(str(file), report("2026-01-01"))
    assert file.read_text() == once


@pytest.mark.parametrize("text", [None, "no marks", "<!-- peers: short -->\nno end"])
def test_what_cannot_be_updated_is_said_before_anything_is_measured(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "page.md"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LoadTestError, match=r"page\.md: (has no marks|cannot be read)"):
        check(str(file))
