"""What the process that downloads a model says: its progress, and why it cannot go on."""

from __future__ import annotations

import json

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from penstock.gateway.llm import hub_download
from penstock.gateway.llm.hub_download import Progress, problem_text


@pytest.fixture(autouse=True)
def each_update_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "_INTERVAL", 0.0)
    monkeypatch.setattr(Progress, "_of_bytes", [])


def said(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, int, str]]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return [(line["done"], line["total"], line["unit"]) for line in lines]


def test_of_two_bars_of_bytes_the_further_one_counts_and_the_smaller_total(capsys: pytest.CaptureFixture[str]) -> None:
    network, disk = Progress(total=100, unit="B"), Progress(total=100, unit="B")
    network.update(40)
    disk.update(10)
    network.update(70)
    network.total = 138  # as the hub's library does when more has come than it expected
    disk.update(70)
    assert said(capsys) == [(40, 100, "B"), (40, 100, "B"), (100, 100, "B"), (100, 100, "B")]


def test_files_are_counted_until_there_are_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    files, disk = Progress(total=7), Progress(total=100, unit="B")
    files.update()
    disk.update(10)
    files.update()
    assert said(capsys) == [(1, 7, "files"), (10, 100, "B"), (10, 100, "B")]


class ConnectionCutError(Exception):
    """Of a library below the hub's: no OSError."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (HFValidationError("no name"), "there is no folder and no hub model called 'org/m'"),
        (LocalEntryNotFoundError("offline\nmore"), "org/m cannot be downloaded: offline"),
        (OSError(), "org/m cannot be downloaded: OSError"),
        (ConnectionCutError("peer closed"), "org/m cannot be downloaded: ConnectionCutError: peer closed"),
        (ConnectionCutError(), "org/m cannot be downloaded: ConnectionCutError"),
    ],
)
def test_every_failure_is_one_line(error: Exception, text: str) -> None:
    assert problem_text("org/m", error) == text


def test_an_error_of_another_library_ends_in_a_problem_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(*_: object, **__: object) -> None:
        raise ConnectionCutError("peer closed")

    monkeypatch.setattr(hub_download.huggingface_hub, "snapshot_download", cut)
    monkeypatch.setattr("sys.argv", ["hub_download", "org/m"])
    hub_download.main()
    assert "peer closed" in json.loads(capsys.readouterr().out)["problem"]
