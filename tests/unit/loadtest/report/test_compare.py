"""Comparing reports: ratios, whether they are more than chance, and what makes a comparison none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.gateway import cli
from penstock.loadtest.compare import as_markdown, differences, names, ratio_interval, ratios, warnings
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions
from penstock.loadtest.report.file import to_json
from penstock.loadtest.report.model import Report, Validity

MakeReport = Callable[..., Report]
MakeRuns = Callable[..., Report]


def main(arguments: Sequence[str]) -> int:
    return cli.main(["loadtest", "compare", *arguments])


@pytest.fixture
def with_ttfts(make_report: MakeReport) -> MakeRuns:
    """A report of runs with one request each, by their TTFT in seconds."""

    def make(*ttfts: float, **fields: object) -> Report:
        runs = [
            [Sample(index=0, intended=0, sent=0, arrivals=[ttft, ttft + 0.1], ended=1.0, output_tokens=2)]
            for ttft in ttfts
        ]
        return make_report(runs, open_loop=False, **fields)

    return make


def ttft(a: Report, b: Report) -> tuple[float | None, str]:
    found = next(ratio for ratio in ratios(a, b) if ratio.figure.path == "ttft_ms.p50")
    return found.ratio, found.verdict


def test_welchs_interval() -> None:
    """Means 100 and 120, standard errors 1 and 2 of them in percent: t of Welch's degrees of freedom, by hand."""
    a, b = [99.0, 100.0, 101.0], [116.0, 120.0, 124.0]
    found = ratio_interval(a, b)
    assert found is not None
    # variances 1 and 16: (1/3/100^2, 16/3/120^2) = (3.333e-5, 3.704e-4); degrees 2.36, so t(2) = 4.303
    half = 4.303 * (1 / 3 / 100**2 + 16 / 3 / 120**2) ** 0.5
    assert found.low == pytest.approx(1.2 / 2.718281828**half, rel=1e-3)
    assert found.high == pytest.approx(1.2 * 2.718281828**half, rel=1e-3)


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], []), ([0.0, 0.0], [1.0, 2.0])])
def test_no_interval_without_repeats_or_without_a_mean(a: Sequence[float], b: Sequence[float]) -> None:
    assert ratio_interval(a, b) is None


def test_runs_that_do_not_vary_have_an_interval_of_no_width() -> None:
    assert ratio_interval([2.0, 2.0], [3.0, 3.0]) == ratio_interval([2.0] * 5, [3.0] * 5)


def test_longer_latencies_are_worse_and_shorter_ones_better(with_ttfts: MakeRuns) -> None:
    a, b = with_ttfts(0.1, 0.101, 0.102), with_ttfts(0.2, 0.202, 0.201)
    ratio, verdict = ttft(a, b)
    assert ratio == pytest.approx(0.603 / 0.303)
    assert verdict == "worse"
    assert ttft(b, a)[1] == "better"


def test_differences_within_the_spread_are_not_shown_as_differences(with_ttfts: MakeRuns) -> None:
    a, b = with_ttfts(0.10, 0.12, 0.14), with_ttfts(0.11, 0.13, 0.15)
    assert ttft(a, b)[1] == "no difference shown"
    text = as_markdown([a, b])
    assert "no difference shown" in text
    assert "one in twenty" in text


def test_single_runs_have_ratios_and_a_warning(with_ttfts: MakeRuns) -> None:
    a, b = with_ttfts(0.1), with_ttfts(0.2)
    assert ttft(a, b) == (pytest.approx(2.0), "")
    assert any("--repeat" in warning for warning in warnings([a, b]))
    assert "one in twenty" not in as_markdown([a, b])


def test_settings_that_differ_are_named(with_ttfts: MakeRuns) -> None:
    a, b = with_ttfts(0.1), with_ttfts(0.1)
    target = Target(url="http://other:9", model="tiny")
    b = replace(
        b, options=Options(target=target, workload=WorkloadOptions(seed=5, prompt_tokens=99), load=b.options.load)
    )
    assert differences(a, b) == [("workload.prompt_tokens", "128", "99")]
    assert "workload.prompt_tokens differs: 128 and 99" in warnings([a, b])


def test_other_machines_are_named_but_not_what_was_measured_of_them(with_ttfts: MakeRuns) -> None:
    a = with_ttfts(0.1, environment={"cpu": {"model": "x"}, "busy": 0.1})
    b = with_ttfts(0.1, environment={"cpu": {"model": "y"}, "busy": 0.2, "gpu": "z"})
    assert differences(a, b) == [("environment.cpu.model", "x", "y"), ("environment.gpu", "nothing", "z")]


def test_figures_that_are_not_valid_are_warned_of(with_ttfts: MakeRuns) -> None:
    bad = with_ttfts(0.1, validity=Validity(verdict="invalid", reasons=["too slow"]), interrupted_by_user=True)
    found = " ".join(warnings([with_ttfts(0.1), bad]))
    assert "is invalid: too slow" in found
    assert "ended early" in found


def test_latencies_from_other_moments_are_warned_of(make_report: MakeReport) -> None:
    found = warnings([make_report(open_loop=True), make_report(open_loop=False)])
    assert any("intended and sent" in warning for warning in found)


def test_all_are_compared_with_the_first(with_ttfts: MakeRuns) -> None:
    text = as_markdown([with_ttfts(0.1, label="one"), with_ttfts(0.2, label="two"), with_ttfts(0.3, label="three")])
    assert text.count("A: one") == 2
    assert "B: two" in text
    assert "B: three" in text


def test_equal_names_are_told_apart_by_the_load_then_by_the_date(with_ttfts: MakeRuns) -> None:
    def at(concurrency: int, date: str) -> Report:
        report = with_ttfts(0.1, date=date)
        return replace(report, options=replace(report.options, load=LoadOptions(concurrency=concurrency)))

    assert names([at(2, "x"), at(4, "x"), at(4, "y"), with_ttfts(0.1, label="beta")]) == [
        "alpha, 2 at a time",
        "alpha, 4 at a time, x",
        "alpha, 4 at a time, y",
        "beta",
    ]


def test_runs_of_failures_only_can_be_compared(make_report: MakeReport) -> None:
    text = as_markdown([make_report(runs=[[]]), make_report()])
    assert "Requests completed" in text


def test_the_command(with_ttfts: MakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ttft_s in (("a", 0.1), ("b", 0.2)):
        (tmp_path / f"{name}.json").write_text(to_json(with_ttfts(ttft_s, label=name)))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main([*files, "--html", str(tmp_path / "c.html")]) == 0
    printed = capsys.readouterr().out
    assert "2.000" in printed
    assert (tmp_path / "c.html").read_text().startswith("<!DOCTYPE html>")
    assert main([*files, "--markdown", str(tmp_path / "c.md")]) == 0
    assert (tmp_path / "c.md").read_text() == printed
    assert capsys.readouterr().out == ""
    assert main([*files, "--markdown", files[0]]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "a.json").read_text().startswith("{")
    assert main([*files, "--markdown", str(tmp_path / "c"), "--html", str(tmp_path / "c")]) == 2


def test_the_command_refuses_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main([str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "x.json: has no schema" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "x.json")])
