"""The Markdown page."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.loadtest.options import Options, Target
from penstock.loadtest.report.markdown import code, escape, markdown, table
from penstock.loadtest.report.model import Report, Validity

MakeReport = Callable[..., Report]


def cells(text: str, first: str) -> list[str]:
    """Of the table row that begins with a cell."""
    line = next(line for line in text.splitlines() if re.match(rf"\| {re.escape(first)} ", line))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_verdict_comes_first_and_its_reasons_follow(full_report: Report) -> None:
    text = markdown(full_report)
    assert text.index("**DOUBTFUL**") < text.index("- 1 request failed") < text.index("What was run")


def test_figures_stand_in_the_row_of_their_name(make_report: MakeReport) -> None:
    text = markdown(make_report(goodput="ttft:250"))
    # p50 p90 p95 p99 max mean min std count, from the intended moment: 100, 200, 800 ms
    assert cells(text, "TTFT") == ["TTFT", "200", "680", "740", "788", "800", "367", "100", "309", "3"]
    assert cells(text, "TTFT from send")[1] == "200"
    assert cells(text, "Requests/s") == ["Requests/s", "1.00"]
    assert cells(text, "Share of good requests") == ["Share of good requests", "50 %"]
    assert cells(text, "Good requests (ttft ≤ 250 ms)")[1] == "2"


def test_intervals_of_repeats_stand_beside_the_figures(full_report: Report) -> None:
    text = markdown(full_report)
    low, high = full_report.intervals["requests_per_s"].low, full_report.intervals["requests_per_s"].high
    assert cells(text, "Requests/s") == ["Requests/s", "1.00", f"{low:.3f} – {high:.2f}"]
    assert " – " in cells(text, "TTFT, 95 %")[1]
    assert cells(text, "3")[0] == "3"


def test_errors_say_what_was_said(make_report: MakeReport) -> None:
    assert cells(markdown(make_report()), "http_503") == ["http_503", "1", "queue is full"]


def test_what_others_say_stays_in_its_cell(make_report: MakeReport) -> None:
    hostile = "a | b\n\n# heading <script>alert(1)</script> [x](http://evil) `code` \x1b[31m"
    text = markdown(make_report(label=hostile, error_details={"http_503": hostile}))
    (detail,) = cells(text, "http_503")[2:]
    assert detail.startswith(r"a \| b \# heading \<script\>")
    assert "\x1b" not in text
    assert "\n# heading" not in text
    assert not re.search(r"(?<!\\)<script|(?<!\\)\[x", text)


def test_a_command_cannot_end_its_block() -> None:
    assert code("x ``` y").splitlines() == ["````", "x ``` y", "````"]


def test_columns_of_numbers_are_aligned_right() -> None:
    rule = table(("name", "n", "text"), [("a", "1,000", "x"), ("b", "2.5", "y")]).splitlines()[1]
    assert re.fullmatch(r"\| -+ \| -+: \| -+ \|", rule)


def test_names_with_underscores_are_left_readable() -> None:
    assert escape("http_503 _emphasis_") == r"http_503 \_emphasis\_"


def test_an_empty_run_says_so(make_report: MakeReport) -> None:
    text = markdown(make_report(runs=[[]], validity=Validity(verdict="invalid", reasons=["no request was completed"])))
    assert "there are no latencies" in text
    assert "- no request was completed" in text


def test_only_settings_that_were_chosen_are_listed(make_report: MakeReport) -> None:
    text = markdown(make_report(options=Options(target=Target(url="http://x", protocol="kserve-grpc"))))
    assert cells(text, "--protocol")[1] == "kserve-grpc"
    assert "--batch-size" not in text
