"""The few lines on a terminal after a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions
from penstock.loadtest.report.figures import load_name
from penstock.loadtest.report.markdown import markdown, summary
from penstock.loadtest.report.model import Report

MakeReport = Callable[..., Report]


def test_goodput_is_a_rate_and_a_share(make_report: MakeReport) -> None:
    report = make_report(goodput="ttft:250")
    assert report.goodput is not None
    lines = summary(report).splitlines()
    assert f"Good requests/s: {report.goodput.requests_per_s:.3f} (50 % of all)" in lines


def test_loads_by_their_names(make_report: MakeReport) -> None:
    def load(**options: Any) -> str:
        chosen = Options(target=Target(url="http://server"), **options)
        report = make_report(options=chosen)
        (line,) = (line for line in markdown(report).splitlines() if line.startswith("| Load "))
        assert load_name(chosen) in summary(report)
        return line.split("|")[2].strip()

    assert load(load=LoadOptions(concurrency=3)) == "closed loop, 3 at a time"
    assert load(load=LoadOptions(rate=3.0)) == "open loop, 3/s poisson"
    assert load(workload=WorkloadOptions(trace="t")) == "open loop, as recorded"
    assert load(workload=WorkloadOptions(trace="t", trace_speed=2.0)) == "open loop, 2 x as recorded"


def test_repeats_do_not_mix_medians_with_sums(make_report: MakeReport, samples: list[Sample]) -> None:
    text = summary(make_report([samples] * 3))
    assert "3 completed (median of the runs), 3 failed (in all runs)" in text


def test_prompts_of_another_length_than_asked_for_are_told(make_report: MakeReport) -> None:
    counts = {"prompt_asked": 128.0, "prompt_counted": 171.2, "note": "prompts had 171 tokens on average"}
    report = make_report(tokens=counts)
    assert "Note: prompts had 171 tokens on average." in summary(report).splitlines()
    assert "128 prompt tokens (171 as counted, mean), 128 output tokens" in markdown(report)
    assert "Note" not in summary(make_report())
