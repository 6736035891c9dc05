"""What the process that downloads a model says: its progress, and why it cannot go on."""

from __future__ import annotations

import json

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from penstock.gateway.models.language import hub_download
from penstock.gateway.models.language.hub_download import Progress, problem_text, progress


@pytest.fixture(autouse=True)
def no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "bars", [])


def test_of_two_bars_of_bytes_the_further_one_counts_and_the_smaller_total() -> None:
    network, disk = Progress(total=100, unit="B"), Progress(total=100, unit="B")
    network.update(40)
    disk.update(10)
    assert progress() == {"done": 40, "total": 100, "unit": "B"}
    network.update(70)
    network.total = 138  # as the hub's library does when more has come than it expected
    assert progress() == {"done": 100, "total": 100, "unit": "B"}


def test_files_are_counted_where_no_bytes_are() -> None:
    assert progress() is None
    files, disk = Progress(total=7), Progress(total=0, unit="B")
    files.update()
    assert progress() == {"done": 1, "total": 7, "unit": "files"}
    disk.total = 100
    assert progress() == {"done": 0, "total": 100, "unit": "B"}


class ConnectionCutError(Exception):
    """Of a library below the hub's: no OSError."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (HFValidationError("no name"), "org/m is neither a folder or file here nor a model of the hub"),
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
