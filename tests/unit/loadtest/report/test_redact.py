"""What authorizes does not go into reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from penstock.loadtest.options import Options, Target
from penstock.loadtest.report.file import redacted, to_json
from penstock.loadtest.report.model import Report

MakeReport = Callable[..., Report]


def test_secrets_are_nowhere_in_a_report(make_report: MakeReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    target = Target(
        url="http://anna:hunter2@server:8000",
        api_key="sk-given",
        header=("Authorization: Bearer s3cret", "X-Tenant: blue", "Cookie: session=c00kie"),
    )
    report = make_report(
        options=Options(target=target),
        command="--url http://anna:hunter2@server:8000 --api-key sk-given --header 'Cookie: session=c00kie'",
        error_details={"http_401": "wrong key s3cret, or sk-environment"},
        environment={"proxy": ["http://bob:pa55@proxy"]},
    )
    text = to_json(redacted(report))
    for secret in ("hunter2", "sk-given", "s3cret", "c00kie", "sk-environment", "pa55"):
        assert secret not in text
    assert "X-Tenant: blue" in text
    assert "http://anna:***@server:8000" in text
    assert redacted(redacted(report)) == redacted(report)


def test_short_keys_do_not_eat_words(make_report: MakeReport) -> None:
    target = Target(url="http://server", api_key="a")
    report = redacted(make_report(options=Options(target=target), command="a load --api-key a"))
    assert report.command == "*** load --api-key ***"
    assert report.label == "alpha"


def test_nothing_to_hide_changes_nothing(full_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert redacted(full_report) == full_report


def test_texts_that_cannot_be_written_are_mended(full_report: Report) -> None:
    report = redacted(replace(full_report, label="half \ud83d"))
    assert report.label == "half ?"
