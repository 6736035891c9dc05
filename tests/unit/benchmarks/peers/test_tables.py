"""What a report says, from runs that were made up."""

from __future__ import annotations

import json

import msgspec
import pytest

from benchmarks.peers.plan import Case
from benchmarks.peers.results import CaseResult, Cell, to_json
from benchmarks.peers.tables import markdown
from penstock.loadtest.report.model import Validity
from support.peer_reports import report_of, run_of


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def cases(text: str) -> list[list[str]]:
    """The rows of the first group's table."""
    return rows(text.split("\n### ", 1)[1])[2:]


def test_generation_shows_speeds_ratios_and_who_took_no_part() -> None:
    ours = Cell(runs=[run_of(1.0), run_of(2.0), run_of(1.0)])
    theirs = Cell(runs=[run_of(2.0), run_of(4.0), run_of(2.0)], memory_mb=12.0)
    text = markdown(report_of("generation", "vllm", vllm=theirs, penstock_vllm=ours))
    assert cases(text)[0] == [
        "4",
        "5.00 (200 / 200)",
        "10.0 (100 / 100)",
        "2.00 \\[2.00, 2.00\\]",
        "200,000 / 100,000",
    ]
    assert "Penstock, openvino did not take part: no such engine" in text
    assert "vLLM (\\`vllm serve\\`) 1.50 s, 12.0 MB; Penstock, vllm 1.50 s" in text
    assert "Computed in: vLLM (\\`vllm serve\\`): bf16; 1 thread." in text, "of those that took part"
    assert "Llama, 4 layers of 256" in text
    assert "†" not in "".join(map("".join, rows(text)))
    assert "/somewhere" not in text
    assert text.count("## What these figures do not say") == 1
    in_short = rows(text)[2]
    assert in_short[1:] == ["vllm", "output tokens/s, tiny", "2.00", "2.00 (4 at a time)", "2.00 (4 at a time)"]


@pytest.mark.parametrize(("table", "ratio"), [("turns", "4.00"), ("images", "2.00")])
def test_turns_are_compared_by_the_last_and_images_by_the_first(table: str, ratio: str) -> None:
    theirs, ours = (
        Cell(runs=[msgspec.structs.replace(run_of(1.0), ttft_ms=ttft)])
        for ttft in ([200.0, 70.0, 80.0], [100.0, 30.0, 20.0])
    )
    report = report_of("generation", "llamacpp", llamacpp=theirs, penstock=ours)
    [group] = report.groups
    group.table = table
    group.cases[0].case = msgspec.structs.replace(group.cases[0].case, table=table)
    text = markdown(report)
    assert cases(text)[0][1:4] == ["200 / 80.0", "100 / 20.0", ratio]


def test_doubts_failures_and_company_are_told() -> None:
    theirs = Cell(runs=[run_of(2.0, verdict="doubtful", tired=7), run_of(2.0, verdict="invalid")])
    ours = Cell(failure="3 output tokens instead of 4")
    third = Cell(runs=[run_of(2.0, foreign=0.5)])
    busy = Validity(verdict="doubtful", reasons=["something else used 1.5 of this machine's 2 cores"])
    theirs.runs.append(msgspec.structs.replace(run_of(2.0), validity=busy, foreign_cores=1.5))
    theirs.runs.append(theirs.runs[-1])
    report = report_of("generation", "vllm", vllm=theirs, penstock_vllm=ours, penstock=third)
    report.skipped, report.interrupted = {"llamacpp": "it is not set up"}, True
    text = markdown(report)
    assert "**invalid** runs are among those of vLLM (\\`vllm serve\\`), 4 at a time" in text
    assert "**doubts**: the client was \\| tired for 7 s (vLLM (\\`vllm serve\\`), 4 at a time)" in text
    assert cases(text)[0][1].endswith(" †")
    assert rows(text)[2][4].endswith(" (4 at a time) †"), "a ratio to an invalid run"
    assert "Penstock, vllm, 4 at a time: 3 output tokens instead of 4" in text
    assert "Penstock, openvino, 4 at a time: 1 run instead of 3" in text
    assert "others used up to 0.500 cores meanwhile (Penstock, openvino, 4 at a time)" in text
    assert text.count("1.5 of this machine's 2 cores") == 1, "told once"
    assert cases(text)[0][2] == "failed"
    assert cases(text)[0][4] == "–", "nothing to compare"
    assert "- llamacpp: it is not set up" in text
    assert "**Ended early by the user**" in text


@pytest.mark.parametrize(
    ("table", "peer", "other", "first", "shown"),
    [
        ("tensors", "mlserver", "penstock_python", ["add_sub", "JSON", "4"], "0.500 (2,000 / 2,000)"),
        ("streaming", "starlette", "penstock_stream", ["4"], "5.00 (0.010)"),
    ],
)
def test_other_tables(table: str, peer: str, other: str, first: list[str], shown: str) -> None:
    report = report_of(table, peer, **{peer: Cell(runs=[run_of(2.0)]), other: Cell(runs=[run_of(1.0)])})
    row = cases(markdown(report))[0]
    assert row[: len(first) + 1] == [*first, shown]
    assert row[len(first) + 2] == "2.00"
    assert (row[-1] == "1.00 / 1.00") == (table == "streaming"), "tokens in an event"


def test_pairs_are_of_one_round() -> None:
    case = Case(table="generation", model="tiny", protocol="openai-completions", concurrency=1)
    result = CaseResult(case=case, cells={"a": Cell(runs=[run_of(2.0), run_of(4.0)]), "b": Cell(runs=[run_of(1.0)])})
    ratio = result.ratios()["b"]
    assert (ratio.ratio, ratio.low) == (2.0, None)


def test_json_holds_runs_and_ratios() -> None:
    report = report_of("generation", "vllm", vllm=Cell(runs=[run_of(2.0)]), penstock_vllm=Cell(runs=[run_of(1.0)]))
    tree = json.loads(to_json(report))
    assert tree["schema"] == "penstock-peers/1"
    [case] = tree["groups"][0]["cases"]
    assert case["ratios"]["penstock-vllm"]["ratio"] == 2.0
    assert case["cells"]["vllm"]["runs"][0]["figures"]["output_tokens_per_s"] == 5.0
    assert case["case"]["concurrency"] == 4
