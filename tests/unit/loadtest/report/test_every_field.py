"""Every field of a report is on the page and in the Markdown: a change of it changes what is seen.

What is in the JSON only is listed here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.loadtest.report.html import page
from penstock.loadtest.report.markdown import markdown
from penstock.loadtest.report.model import Report

Path = tuple[str | int, ...]

NOT_SHOWN = re.compile(
    r"schema|intervals\.|runs\.|options\.output\."
    r"|histograms\.itl_ms\.(absent|failed)"  # of all requests together: there is no share of requests
    r"|validity\.(lag_ms|send_lag_ms)\.(?!p50|p99)"  # two percentiles of these
    r"|server\.(seconds|metrics|gpu)\."  # the number of looks; least, mean and most: tested by themselves
    r"|from_send\.\w+\.(?!p50)"  # all in a row of the table: one stands for them
)
NOT_IN_MARKDOWN = re.compile(r"timeline\.|histograms\.|options\.")  # plots, and only the settings that were chosen


def leaves(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Of lists, the first element stands for all."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, (*path, name))
    elif isinstance(tree, list):
        if tree:
            yield from leaves(tree[0], (*path, 0))
    else:
        yield path


def changes(value: Any) -> list[Any]:
    """Other values, of which one will do."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 3 + 50, value / 2]
    if isinstance(value, str):
        return [value + "x", "kserve-grpc", "gamma", "azure"]
    return ["http://other", "rate", 7, 7.5]


def plain(report: Report) -> Any:
    return msgspec.json.decode(msgspec.json.encode(report))


def changed(report: Report, path: Path) -> Report:
    tree = plain(report)
    *way, last = path
    place = tree
    for step in way:
        place = place[step]
    before = copy.copy(place[last])
    for value in changes(before):
        place[last] = value
        try:
            return msgspec.convert(tree, Report)
        except msgspec.ValidationError:
            continue
    raise AssertionError(f"no other value for {path}")


def seen(report: Report) -> str:
    text = page([report])
    return text[: text.index('<script type="application/json"')]


def test_every_field_is_seen_on_the_page(full_report: Report) -> None:
    before = seen(full_report)
    paths = [path for path in leaves(plain(full_report)) if not NOT_SHOWN.match(".".join(map(str, path)))]
    assert len(paths) > 140
    unseen = [path for path in paths if seen(changed(full_report, path)) == before]
    assert unseen == []


def test_every_figure_is_in_the_markdown(full_report: Report) -> None:
    before = markdown(full_report)
    unseen = [
        path
        for path in leaves(plain(full_report))
        if not (NOT_SHOWN.match(name := ".".join(map(str, path))) or NOT_IN_MARKDOWN.match(name))
        if markdown(changed(full_report, path)) == before
    ]
    assert unseen == []


def test_gauges_are_summed_up(full_report: Report) -> None:
    for text in (markdown(full_report), seen(full_report)):
        assert re.search(r"queue_length\W.{0,60}?1\.00\W.{0,20}?2\.00\W.{0,20}?3\.00", text)
        assert re.search(r"gpu0_utilization\W.{0,60}?71\.0\W.{0,20}?82\.0\W.{0,20}?93\.0", text)
        assert re.search(r"preemptions_total\W.{0,60}?12", text)
        assert "Read 2 times from http" in text
