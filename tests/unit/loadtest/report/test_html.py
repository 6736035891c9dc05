"""The page: what it shows, that it fetches nothing, and that texts of others stay texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import LoadOptions
from penstock.loadtest.report.html import page
from penstock.loadtest.report.html.plot import linear, logarithmic, tick
from penstock.loadtest.report.model import Report, Validity

MakeReport = Callable[..., Report]
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects what is seen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.startswith("["):
            self.data = data
        elif not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def all(self, tag: str, class_: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and (not class_ or class_ in (attributes.get("class") or "").split())
        ]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_the_page_is_well_formed_and_fetches_nothing(full_report: Report) -> None:
    text = page([full_report, full_report])
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    for tag, attributes in found.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "@import" not in text
    assert "url(" not in text


def test_both_schemes_phones_and_paper_are_provided_for(full_report: Report) -> None:
    text = page([full_report])
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in Page(text).all("meta")


def test_plots_are_told_in_words_too(full_report: Report) -> None:
    found = Page(page([full_report]))
    plots = len(found.all("svg"))
    assert plots >= 12
    assert all(attributes["role"] == "img" for attributes in found.all("svg"))
    assert len(found.all("desc")) == plots
    ttft = full_report.ttft_ms
    assert ttft is not None
    assert f"p50 {ttft.p50:.0f} ms, p90 {ttft.p90:.0f} ms, p99 {ttft.p99:.0f} ms" in found.text


def test_key_figures_and_verdict(make_report: MakeReport) -> None:
    found = Page(page([make_report(goodput="ttft:250")]))
    assert len(found.all("span", "valid")) == 1
    for words in (
        "Output tokens/s",
        "2.67",
        "TTFT p50",
        "200 ms",
        "p99 788 ms",
        "50 %",
        "25 % of 4 requests",
        "queue is full",
    ):
        assert words in found.words, words


def test_bounds_are_marked_with_what_they_reach(make_report: MakeReport) -> None:
    found = Page(page([make_report(goodput="ttft:250 e2e:900")]))
    assert len(found.all("line", "bound")) == 2
    assert "≤ 250 ms: 50 %" in found.words
    assert "1 failed request among them" in found.text


def test_texts_of_others_stay_texts(make_report: MakeReport) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"
    report = make_report(
        label=hostile,
        command=hostile,
        error_details={"http_503": hostile},
        environment={hostile: hostile},
        validity=Validity(verdict=hostile, reasons=[hostile]),
    )
    text = page([report, report])
    found = Page(text)
    assert len(found.all("script")) == 2
    assert not found.all("img")
    assert "\u202e" not in found.text
    assert "<script>alert(1)" in found.text  # as words
    assert json.loads(found.data)[0]["error_details"]["http_503"] == hostile


def test_an_unknown_verdict_is_not_shown_as_good(make_report: MakeReport) -> None:
    found = Page(page([make_report(validity=Validity(verdict="new"))]))
    assert not found.all("span", "valid")
    assert found.all("span", "invalid")


def test_an_empty_run_has_a_page(make_report: MakeReport) -> None:
    found = Page(page([make_report(runs=[[]], validity=Validity(verdict="invalid", reasons=["nothing"]))]))
    assert not found.all("svg")
    assert "nothing" in found.words


def test_equal_latencies_and_pieces_that_came_together_can_be_drawn(make_report: MakeReport) -> None:
    samples = [
        Sample(index=i, intended=0, sent=0, arrivals=[0.5, 0.5, 0.5], ended=0.5, output_tokens=3) for i in range(3)
    ]
    found = Page(page([make_report(runs=[samples], open_loop=False)]))
    assert "6 values, 100 % under 0.01 ms" in found.words
    assert "nan" not in found.text.lower()


def test_several_reports_get_curves_a_table_and_their_own_parts(make_report: MakeReport) -> None:
    def at(label: str, concurrency: int) -> Report:
        report = make_report(open_loop=False, label=label)
        return replace(report, options=replace(report.options, load=LoadOptions(concurrency=concurrency)))

    found = Page(page([at("a", 8), at("a", 1), at("b", 1)]))
    assert {"TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "E2E p99, ms"} <= set(found.words)
    assert {attributes["href"] for attributes in found.all("a")} == {"#run1", "#run2", "#run3"}
    assert {attributes["id"] for attributes in found.all("details", "run")} == {"run1", "run2", "run3"}
    assert len(found.all("ul", "legend")) == 1
    assert {"a, 8 at a time", "a, 1 at a time", "b, 1 at a time"} <= set(found.words)


def test_more_labels_than_colours_are_numbered(make_report: MakeReport) -> None:
    reports = [make_report(label=f"run-{letter}") for letter in "abcde"]
    few, many = Page(page(reports[:4])), Page(page(reports))
    assert "run-a" in few.words
    assert {"1: run-a", "5: run-e", "1"} <= set(many.words)


def test_runs_that_are_not_valid_are_drawn_hollow(make_report: MakeReport) -> None:
    good, bad = make_report(), make_report(validity=Validity(verdict="invalid"))
    plots = 6
    assert len(Page(page([good, bad])).all("circle", "hollow")) == plots


def test_secrets_do_not_reach_the_page(make_report: MakeReport) -> None:
    report = make_report()
    target = replace(report.options.target, api_key="sk-secret")
    assert "sk-secret" not in page(
        [replace(report, options=replace(report.options, target=target), command="sk-secret")]
    )


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a report"):
        page([])


def test_the_same_reports_make_the_same_page(full_report: Report) -> None:
    assert page([full_report]) == page([full_report])


@pytest.mark.parametrize("high", [0.002, 1, 7, 99.9, 12345, 3e7])
def test_linear_axes_start_at_zero_and_have_round_ticks(high: float) -> None:
    scale = linear(high, 0, 100)
    ticks = scale.ticks(5)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 6
    assert scale.high >= high >= ticks[-1] * 0.7
    assert scale(high) <= 100


@pytest.mark.parametrize(("low", "high"), [(10, 10), (9.8, 11.3), (1, 50), (0.01, 60_000)])
def test_logarithmic_axes_hold_their_values_and_some_ticks(low: float, high: float) -> None:
    scale = logarithmic(low, high, 40, 350)
    places = [scale(value) for value in (low, *scale.ticks(), high)]
    assert all(40 <= place <= 350 for place in places)
    assert 2 <= len(scale.ticks()) <= 7
    assert scale.ticks() == sorted(set(scale.ticks()))


def test_ticks_are_short() -> None:
    assert [tick(value) for value in (0.05, 20, 1500, 15_000, 2e6)] == ["0.05", "20", "1500", "15k", "2M"]
    assert re.fullmatch(r"[\d.]+", tick(999.5))
