"""The few lines on a terminal after a run."""

from __future__ import annotations

from collections.abc import Callable

from penstock.loadtest.report.markdown import markdown
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.summary import summary

MakeReport = Callable[..., Report]


def test_goodput_is_a_rate_and_a_share(make_report: MakeReport) -> None:
    report = make_report(goodput="ttft:250")
    assert report.goodput is not None
    lines = summary(report).splitlines()
    assert f"Good requests/s: {report.goodput.requests_per_s:.3f} (50 % of all)" in lines


def test_prompts_of_another_length_than_asked_for_are_told(make_report: MakeReport) -> None:
    counts = {"prompt_asked": 128.0, "prompt_counted": 171.2, "note": "prompts had 171 tokens on average"}
    report = make_report(tokens=counts)
    assert "Note: prompts had 171 tokens on average." in summary(report).splitlines()
    assert "128 prompt tokens (171 as counted, mean), 128 output tokens" in markdown(report)
    assert "Note" not in summary(make_report())
